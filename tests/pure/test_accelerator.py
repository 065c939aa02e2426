"""The choice of a target, for every accelerator, device and state of the backends."""

from __future__ import annotations

import pytest

from deepinfer import accelerator
from deepinfer.accelerator import Backend, Choice, require_runnable, resolve_target
from deepinfer.devices import AscendDevice, NvidiaDevice
from deepinfer.errors import ArtifactError, SpecError

EVERYTHING = ("sm100", "sm90", "ascend950", "cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Make this machine look like another: `machine(capability=(9, 0), built=("cpu",))`."""

    def pretend(
        *,
        capability: tuple[int, int] | None = None,
        soc: str | None = None,
        built: tuple[str, ...] = EVERYTHING,
        unproven: tuple[str, ...] = (),
        accelerator_variable: str | None = None,
    ) -> None:
        families = {"ascend950": ("ascend950",), "cpu": ("cpu",), "cuda_sm100": ("sm100", "sm90")}
        announced = [Backend(name, t, all(x in built for x in t), unproven=unproven) for name, t in families.items()]
        monkeypatch.setattr(accelerator, "backends", lambda: announced)
        monkeypatch.setattr(accelerator, "nvidia_device", lambda: NvidiaDevice(capability, "there is none"))
        monkeypatch.setattr(accelerator, "ascend_device", lambda: AscendDevice(soc, "there is none"))
        if accelerator_variable is None:
            monkeypatch.delenv(accelerator.VARIABLE, raising=False)
        else:
            monkeypatch.setenv(accelerator.VARIABLE, accelerator_variable)

    return pretend


@pytest.mark.parametrize(
    ("variable", "capability", "target"),
    [
        ("nvidia", (10, 0), "sm100"),
        ("nvidia", (9, 0), "sm90"),
        ("nvidia", None, "sm100"),
        ("ascend", None, "ascend950"),
        ("cpu", (10, 0), "cpu"),
    ],
)
def test_the_variable_names_the_accelerator(machine, variable, capability, target) -> None:
    machine(accelerator_variable=variable, capability=capability)
    choice = resolve_target()
    assert choice.target == target
    assert f"DEEPINFER_ACCELERATOR={variable}" in choice.reason


@pytest.mark.parametrize(
    ("capability", "soc", "built", "target", "why"),
    [
        ((10, 0), None, EVERYTHING, "sm100", "a device for sm100 is here"),
        ((9, 0), "Ascend950PR_9589", EVERYTHING, "sm90", "a device for sm90 is here"),
        (None, "Ascend950PR_9589", EVERYTHING, "ascend950", "a device for ascend950 is here"),
        (None, "Ascend910B3", EVERYTHING, "cpu", "no accelerator"),
        (None, None, EVERYTHING, "cpu", "no accelerator"),
        ((9, 0), None, ("cpu",), "cpu", "sm90 is here, but engines for it do not run"),
        ((12, 0), None, EVERYTHING, "cpu", "12.0, which no target fits"),
    ],
)
def test_unset_takes_the_best_target_found_that_is_built(
    machine, capability, soc, built, target, why
) -> None:
    machine(capability=capability, soc=soc, built=built)
    choice = resolve_target()
    assert choice.target == target
    assert why in choice.reason


def test_a_target_that_nobody_has_run_has_to_be_asked_for(machine) -> None:
    here = {"soc": "Ascend950PR_9589", "unproven": ("ascend950",)}
    machine(**here)
    choice = resolve_target()
    assert choice.target == "cpu" and "no engine for it has run on one yet" in choice.reason
    require_runnable("ascend950", "an_engine")  # its device is here
    machine(**here, accelerator_variable="ascend")
    assert resolve_target().target == "ascend950"


def test_an_empty_variable_counts_as_unset(machine) -> None:
    machine(accelerator_variable="")
    assert resolve_target().target == "cpu"


def test_an_explicit_target_goes_before_the_variable(machine) -> None:
    machine(accelerator_variable="ascend", capability=(10, 0))
    assert resolve_target("cpu") == Choice("cpu", "asked for by name")


@pytest.mark.parametrize("value", ["gpu", "CPU", "nvidia,cpu"])
def test_an_unknown_accelerator_names_found_and_allowed(machine, value) -> None:
    machine(accelerator_variable=value)
    with pytest.raises(SpecError, match=f"found {value}; allowed nvidia, ascend, cpu"):
        resolve_target()


def test_an_unknown_target_names_found_and_allowed(machine) -> None:
    machine()
    with pytest.raises(SpecError, match="found sm80; allowed sm100, sm90, ascend950, cpu"):
        resolve_target("sm80")
    with pytest.raises(SpecError, match="a target names the chip: sm100 or sm90"):
        resolve_target("nvidia")


@pytest.mark.parametrize(("explicit", "variable"), [("sm90", None), (None, "nvidia")])
def test_a_target_that_is_not_built_is_refused_when_it_has_to_be(machine, explicit, variable) -> None:
    machine(built=("cpu",), accelerator_variable=variable, capability=(9, 0))
    with pytest.raises(SpecError, match=r"not built yet.*found sm90.*allowed cpu"):
        resolve_target(explicit)
    assert resolve_target(explicit, need_built=False).target == "sm90"


def test_a_device_no_target_fits_is_refused_when_asked_for(machine) -> None:
    machine(accelerator_variable="nvidia", capability=(8, 9))
    with pytest.raises(SpecError, match=r"found compute capability 8\.9; allowed 9\.0"):
        resolve_target()


@pytest.mark.parametrize(
    ("engine", "capability", "variable", "runs"),
    [
        ("cpu", None, None, True),
        ("cpu", (10, 0), None, True),
        ("cpu", (10, 0), "nvidia", False),
        ("sm90", (9, 0), None, True),
        ("sm90", (10, 0), None, False),
        ("sm90", (9, 0), "cpu", False),
        ("sm100", None, None, False),
    ],
)
def test_an_engine_for_another_target_names_both(machine, engine, capability, variable, runs) -> None:
    machine(capability=capability, accelerator_variable=variable)
    if runs:
        require_runnable(engine, "engines/e")
        return
    with pytest.raises(ArtifactError, match=f"engines/e: .* found an engine for {engine} on ") as caught:
        require_runnable(engine, "engines/e")
    assert f"--target {caught.value.allowed}" in str(caught.value)


@pytest.mark.parametrize(
    ("engine", "capability", "variable", "advice"),
    [
        ("cpu", None, "nvidia", "unset DEEPINFER_ACCELERATOR (it is nvidia)"),
        ("cpu", (10, 0), "nvidia", "set DEEPINFER_ACCELERATOR=cpu"),
        ("sm90", None, None, "compile again with --target cpu"),
        ("sm90", (10, 0), "nvidia", "compile again with --target cpu and set DEEPINFER_ACCELERATOR=cpu"),
        ("sm90", (10, 0), None, "compile again with --target cpu"),
    ],
)
def test_the_advice_for_another_target_s_engine_names_no_target_that_is_not_built(
    machine, engine, capability, variable, advice
) -> None:
    machine(capability=capability, accelerator_variable=variable, built=("cpu",))
    with pytest.raises(ArtifactError) as caught:
        require_runnable(engine, "engines/e")
    assert caught.value.next_step == advice


def test_every_target_belongs_to_one_backend_that_announces_it() -> None:
    served = [target for backend in accelerator.backends() for target in backend.targets]
    assert sorted(served) == sorted(accelerator.known_targets())
