"""One rule of the store is broken at a time, in a copy of the tree; the tests named beside it have to notice.

    python tests/store/mutants.py                    # all of them; exit code 1 when one survives
    python tests/store/mutants.py pins salt          # those whose name holds one of the words

A run of all of them is kept in mutants.json.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("mutants.json")
_PATIENCE = 300.0  # seconds for the tests of a mutant: one that hangs them was noticed
_FAULTS = "test_faults.py"


@dataclass(frozen=True)
class Mutant:
    """``old`` becomes ``new`` in a file of runtime/store; ``tests``: of tests/store, as pytest takes them."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def _m(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name, file, old, new, tests)


MUTANTS = (
    _m("sums do not know their slot", "record.py", "(xxhash.xxh3_64_intdigest(uuid) + position) & _MASK",
       "(xxhash.xxh3_64_intdigest(uuid)) & _MASK", "test_format.py", "-k", "another_place or log_ends"),
    _m("ids are not compared", "record.py", "if wanted.ids is not None and record[", "if False and record[",
       "test_store.py", "-k", "other_ids"),
    _m("sections are not proved", "record.py",
       "return list(_SUMS.unpack_from(record, _FIXED.size)) == section_sums(layout, record, seed)", "return True",
       "test_format.py", "-k", "every_bit"),
    _m("native: ids are not compared", "native/records.cpp", "if (want.ids && std::memcmp", "if (false && std::memcmp",
       "test_native.py", "-k", "something_else"),
    _m("native: sections are not proved", "native/records.cpp", "!= head.sums[i]) return false;",
       "!= head.sums[i]) continue;", "test_native.py", "-k", "every_byte"),
    _m("native: copied before it is proved", "native/records.cpp",
       "const Status status = complete ?", "scatter(layout, record, want);\n  const Status status = complete ?",
       "test_native.py", "-k", "every_byte"),
    _m("native: memory that was given up is written", "native/records.cpp",
       "if (!moves(&want.state, kWaiting, kCopying)) {", "if (moves(&want.state, kWaiting, kCopying) && false) {",
       "test_native.py", "-k", "given_up"),
    _m("native: giving up does not wait for a copy", "native/records.cpp", "== kCopying)\n      sched_yield();",
       "== kCopying)\n      break;", "test_native.py", "-k", "given_up"),
    _m("native: a gate holds nobody back", "native/gate.h", "while (sem_wait(&left_) != 0) {",
       "while (sem_trywait(&left_) != 0 && false) {", "test_native.py", "-k", "gate"),
    _m("native: who failed stays in the gate", "native/records.cpp", "if (gate != nullptr) gate->leave();",
       "if (gate != nullptr && got >= 0) gate->leave();", "test_native.py", "-k", "gate"),
    _m("native: a ring hands one record's bytes to another", "native/records.cpp", "under_way.record[slot] = next;",
       "under_way.record[slot] = next ^ 1;", "test_native.py", "-k", "any_order"),
    _m("memory of a lost read of 3FS is used again", "backends/usrbio.py", "if slot not in lost]", "]",
       "test_backends.py", "-k", "one_by_one"),
    _m("records are announced in the log of another segment", "publisher.py",
       "if following.segment is not group[0].segment:", "if False:", "test_store.py", "-k", "announced_together"),
    _m("the index is mapped for writing", "index.py", "writemap=False", "writemap=True", "test_mount.py", "-k",
       "mapped"),
    _m("a name comes before its bytes are synced", "writer.py",
       "block.footer, Point.FOOTER)\n    files.sync(fd, Point.FOOTER)", "block.footer, Point.FOOTER)", "test_mount.py",
       "-k", "names_are"),
    _m("tickets do not hold native reads back", "bulk.py",
       "wishes.ticket.guard = lambda: self.native.give_up(wants)", "pass", "test_native.py", "-k", "cancelled"),
    _m("native: a late use is not noted", "bulk.py", "                self._touched(wishes.keys[place]",
       "                id(wishes.keys[place]", "test_native.py", "-k", "consequences"),
    _m("a clean stamp is believed whatever the file holds", "index.py", "return stamp == self._file_sum()",
       "return bool(stamp)", "test_format.py", "-k", "last_user"),
    _m("a hint needs no sum", "index.py", "return hints if sound.all() else", "return hints if True else",
       "test_format.py", "-k", "another_key"),
    _m("compare and set does not compare", "index.py", "txn.get(key, db=self._keys) == old.tobytes()",
       "txn.get(key, db=self._keys) is not None", "test_format.py", "-k", "compare_and_set"),
    _m("a log goes on behind a broken entry", "log.py", "            whole = index\n            break",
       "            continue", "test_format.py", "-k", "log_ends"),
    _m("an orphan's log is believed", "upkeep.py",
       "entries = self.catalog.whole_ones(segment, block, self.catalog.sealed_puts(segment, block))",
       "entries = self.catalog.sealed_puts(segment, block)", "test_compaction.py", "-k", "orphan"),
    _m("sealing syncs nothing", "writer.py", "        self.files.sync(s.fd, Point.REORDERED)\n"
       "        self.files.sync(s.log_fd, Point.REORDERED)\n        finish",
       "        vars(self.files)['sync'] = lambda *_: None\n        finish", _FAULTS, "-k", "sealed_survives"),
    _m("originals go before their copies are synced", "compaction.py", "            self._sync()\n",
       "            pass\n", _FAULTS, "-k", "prefix"),
    _m("compaction copies what it did not prove", "compaction.py",
       "if head is None or head.key != key or not whole(block.layout, self._record, block.uuid, slot):",
       "if head is None or head.key != key:", "test_compaction.py", "-k", "damaged_record"),
    _m("a segment is adopted from a writer that lives", "upkeep.py",
       "name.owner != me and self.leases.dead(name.owner, now)", "name.owner != me", "test_compaction.py",
       "-k", "that_lives"),
    _m("a lease of another host is judged like ours", "lease.py",
       "        return bool(now - heartbeat > self.settings.foreign_lease_seconds)\n\n",
       "        return bool(now - heartbeat > self.settings.lease_seconds)\n\n", "test_format.py", "-k", "dead"),
    _m("a store writes on into what was purged", "writer.py", "return not there", "return False",
       "test_cache_command.py", "-k", "goes_on"),
    _m("a segment that a listing missed is left", "writer.py", "return not there", "return True",
       "test_cache_command.py", "-k", "filled_on"),
    _m("the quota takes what is pinned", "upkeep.py",
       "if s.name.state == SEALED and not s.pins]", "if s.name.state == SEALED]", "test_store.py", "-k", "quota"),
    _m("what another model left stays", "upkeep.py", "name is None or path.parent.parent == ours:", "True:",
       "test_store.py", "-k", "another_model_left"),
    _m("an expired hint counts", "catalog.py", "(table[inside] > self.guard.hour) & (numbers < len(table))",
       "(table[inside] > 0) & (numbers < len(table))", "test_store.py", "-k", "classes"),
    _m("time runs backwards", "time_guard.py", "self._now = max(self._now, min(", "self._now = (min(",
       "test_degrade.py", "-k", "backwards"),
    _m("a clock that is ahead expires everything", "time_guard.py", "if self._monotonic() - self._started >= HOUR:",
       "if True:", "test_degrade.py", "-k", "ahead"),
    _m("a replayed block replaces an exact one", "publisher.py",
       "return not hint[\"flags\"] & Flags.REPLAYED or Flags.REPLAYED in write.flags", "return False",
       "test_store.py", "-k", "exact_block"),
    _m("damage is not forgotten", "store.py", "        self.index.replace(key, hint, None)\n        self.writers.mark",
       "        self.writers.mark", "test_degrade.py", "-k", "rots"),
    _m("a damaged segment stays", "store.py", "if segment.damaged >= self.settings.bad_after", "if False",
       "test_degrade.py", "-k", "much_damage"),
    _m("a full disk gives up nothing", "upkeep.py", "self.settings.segment_bytes))) > 0",
       "self.settings.segment_bytes))) > 1 << 60", "test_degrade.py", "-k", "gives_up"),
    _m("an absent mount is filled in", "files.py", "if within is not None and within in missing:", "if False:",
       "test_degrade.py", "-k", "goes_away"),
    _m("trouble is told every time", "health.py", "if now - self._warned.get(topic, -WARN_SECONDS) < WARN_SECONDS:",
       "if False:", "test_degrade.py", "-k", "once_a_minute"),
    _m("a mount that hangs is asked for ever", "store.py", "off=self._late > 1)", "off=False)", "test_degrade.py",
       "-k", "does_not_answer"),
    _m("closing leaves fetches to their fate", "store.py", "            ticket.wait(0.0)  # from here on",
       "            id(ticket)  #", "test_degrade.py", "-k", "closing"),
    _m("files are readable by all", "files.py", "FILE_MODE, FOLDER_MODE = 0o600, 0o700",
       "FILE_MODE, FOLDER_MODE = 0o644, 0o755", "test_store.py", "-k", "owners_alone"),
    _m("the arena keeps its name", "store.py", "        self._arena.forget_name()\n        self._bulk",
       "        self._bulk", "test_store.py", "-k", "owners_alone"),
    _m("a purge keeps the salt", "salts.py", "            self.files.unlink(self._path(tenant), Point.OTHER)",
       "            self._path(tenant).stat()", "test_store.py", "-k", "purged"),
    _m("the namespace does not know the sections", "layout.py", "self.kind.encode(), tokens, sections)",
       "self.kind.encode(), tokens)", "test_store.py", "-k", "another_namespace"),
    _m("a record that was never used moves for ever", "compaction.py", "if not used and self.catalog.guard.now() >",
       "if False and self.catalog.guard.now() >", "test_compaction.py", "-k", "for_ever"),
)


def survives(mutant: Mutant, tree: Path) -> bool:
    """Whether the tests pass although the rule is broken."""
    path = tree / "runtime" / "store" / mutant.file
    whole = path.read_text()
    if whole.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: {mutant.file} holds the text to be changed {whole.count(mutant.old)} times")
    path.write_text(whole.replace(mutant.old, mutant.new))
    tests = [f"tests/store/{part}" if part.endswith(".py") else part for part in mutant.tests]
    try:
        done = subprocess.run([sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests], cwd=tree,
                              env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True, check=False,
                              timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return False
    finally:
        path.write_text(whole)
    if done.returncode not in (0, 1):  # nothing was collected, or the change is no program
        raise SystemExit(f"{mutant.name}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}")
    return done.returncode == 0


def main() -> None:
    words, survivors, count = sys.argv[1:], [], 0
    with tempfile.TemporaryDirectory(prefix="deepinfer-mutants-") as name:
        tree = Path(name) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__"))
        for mutant in MUTANTS:
            if words and not any(word in mutant.name for word in words):
                continue
            count += 1
            alive = survives(mutant, tree)
            survivors += [mutant.name] if alive else []
            print(f"{'SURVIVES' if alive else 'killed':8}  {mutant.name}", flush=True)
    print(f"{count - len(survivors)} of {count} killed")
    if not words:
        names = [mutant.name for mutant in MUTANTS]
        RESULTS.write_text(json.dumps({"killed": [n for n in names if n not in survivors], "mutants": count,
                                       "survivors": survivors}, indent=1) + "\n")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
