"""How a prompt gets from the front end to the engine process: inside its message, or through shared memory beside it.

    python tests/bench/bench_wire.py

Times are of the round trip of a request and a short answer; both ways run in turns in the same processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import zmq

from deepinfer.runtime.server import wire

LENGTHS = (1_000, 10_000, 100_000, 1_000_000)
ACK = wire.encode(wire.Abort(0))


def engine(endpoint: str, name: str) -> None:
    """Takes requests and turns their prompts into the list that the engine core takes."""
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.connect(endpoint)
    memory = SharedMemory(name)
    socket.send(ACK)
    while isinstance(message := wire.decode_to_engine(socket.recv()), wire.Submit):
        count = message.sampling.get("ids")
        ids = wire.unpack_ids(message.prompt if count is None else bytes(memory.buf[: 4 * count]))
        assert ids[-1] == 1
        socket.send(ACK)
    memory.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    memory = SharedMemory(create=True, size=4 * LENGTHS[-1])
    with tempfile.TemporaryDirectory() as folder:
        context = zmq.Context()
        socket = context.socket(zmq.PAIR)
        endpoint = f"ipc://{folder}/bench.ipc"
        socket.bind(endpoint)
        child = multiprocessing.get_context("spawn").Process(target=engine, args=(endpoint, memory.name))
        child.start()
        socket.recv()
        found = {}
        for length in LENGTHS:
            ids = np.ones(length, np.int64).tolist()
            times: dict[str, list[float]] = {"message": [], "shared memory": [], "packing alone": []}
            for _ in range(given.repeat):
                begun = time.perf_counter()
                packed = wire.pack_ids(ids)
                times["packing alone"].append(time.perf_counter() - begun)
                begun = time.perf_counter()
                socket.send(wire.encode(wire.Submit(1, wire.pack_ids(ids), {})))
                socket.recv()
                times["message"].append(time.perf_counter() - begun)
                begun = time.perf_counter()
                packed = wire.pack_ids(ids)
                memory.buf[: len(packed)] = packed
                socket.send(wire.encode(wire.Submit(1, b"", {"ids": length})))
                socket.recv()
                times["shared memory"].append(time.perf_counter() - begun)
            found[length] = {name: {"best_ms": round(1e3 * min(t), 3), "median_ms": round(1e3 * float(np.median(t)), 3)}
                             for name, t in times.items()}
            print(f"{length:>9} ids: " + ", ".join(f"{n} {t['best_ms']:.2f} ms best, {t['median_ms']:.2f} median"
                                                   for n, t in found[length].items()), file=sys.stderr)
        socket.send(wire.encode(wire.Stop()))
        child.join()
        context.destroy(linger=0)
    memory.close()
    memory.unlink()
    text = json.dumps(found, indent=1)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
