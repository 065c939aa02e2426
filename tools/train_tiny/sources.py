"""The Debian packages whose text the demonstration model learns from, and their licences."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """One upstream project, the binary packages that carry its text, and the licence of that text."""

    project: str
    licence: str
    packages: tuple[str, ...]


SOURCES: tuple[Source, ...] = (
    Source("CPython", "PSF-2.0", ("python3.11-doc", "libpython3.11-stdlib", "libpython3.11-minimal")),
    Source("CPython test suite", "PSF-2.0", ("libpython3.11-testsuite",)),
    Source("aiohttp", "Apache-2.0", ("python-aiohttp-doc", "python3-aiohttp")),
    Source("Astropy", "BSD-3-Clause", ("python-astropy-doc", "python3-astropy")),
    Source("attrs", "MIT", ("python-attr-doc", "python3-attr")),
    Source("Babel", "BSD-3-Clause", ("python-babel-doc", "python3-babel")),
    Source("Celery", "BSD-3-Clause", ("python-celery-doc", "python3-celery")),
    Source("Click", "BSD-3-Clause", ("python-click-doc", "python3-click")),
    Source("Dask", "BSD-3-Clause", ("python-dask-doc", "python3-dask")),
    Source("Django", "BSD-3-Clause", ("python-django-doc", "python3-django")),
    Source("Flask", "BSD-3-Clause", ("python-flask-doc", "python3-flask")),
    Source("IPython", "BSD-3-Clause", ("python-ipython-doc", "python3-ipython")),
    Source("Jinja", "BSD-3-Clause", ("python-jinja2-doc", "python3-jinja2")),
    Source("Matplotlib", "PSF-based", ("python3-matplotlib",)),
    Source("mpmath", "BSD-3-Clause", ("python-mpmath-doc", "python3-mpmath")),
    Source("NetworkX", "BSD-3-Clause", ("python3-networkx",)),
    Source("NLTK", "Apache-2.0", ("python3-nltk",)),
    Source("NumPy", "BSD-3-Clause", ("python3-numpy",)),
    Source("pandas", "BSD-3-Clause", ("python-pandas-doc", "python3-pandas")),
    Source("pip", "MIT", ("python3-pip",)),
    Source("pydantic", "MIT", ("python3-pydantic",)),
    Source("Pygments", "BSD-2-Clause", ("python3-pygments",)),
    Source("pytest", "MIT", ("python-pytest-doc", "python3-pytest")),
    Source("Requests", "Apache-2.0", ("python-requests-doc", "python3-requests")),
    Source("Rich", "MIT", ("python3-rich",)),
    Source("scikit-image", "BSD-3-Clause", ("python3-skimage",)),
    Source("scikit-learn", "BSD-3-Clause", ("python-sklearn-doc", "python3-sklearn")),
    Source("SciPy", "BSD-3-Clause", ("python3-scipy",)),
    Source("Scrapy", "BSD-3-Clause", ("python-scrapy-doc", "python3-scrapy")),
    Source("setuptools", "MIT", ("python-setuptools-doc", "python3-setuptools")),
    Source("Sphinx", "BSD-2-Clause", ("sphinx-doc", "python3-sphinx")),
    Source("SQLAlchemy", "MIT", ("python-sqlalchemy-doc", "python3-sqlalchemy")),
    Source("statsmodels", "BSD-3-Clause", ("python-statsmodels-doc", "python3-statsmodels")),
    Source("SymPy", "BSD-3-Clause", ("python-sympy-doc", "python3-sympy")),
    Source("Tornado", "Apache-2.0", ("python-tornado-doc", "python3-tornado")),
    Source("Twisted", "MIT", ("twisted-doc", "python3-twisted")),
    Source("Werkzeug", "BSD-3-Clause", ("python-werkzeug-doc", "python3-werkzeug")),
    Source("xarray", "Apache-2.0", ("python-xarray-doc", "python3-xarray")),
)

# Their documentation comes as HTML without its reStructuredText sources.
HTML_PACKAGES = frozenset({"python-django-doc", "python-scrapy-doc"})
