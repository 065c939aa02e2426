// The twin's C border: one launch, with the extents that it may touch.
#include <cstring>

#include "machine.h"

#define DI_OUT extern "C" __attribute__((visibility("default")))

// 0, or 1 with sentences, one a line, in `report`. Arguments as the device packs them; extents: pairs of an address and
// bytes.
DI_OUT int di_twin_launch(const char* symbol, int64_t blocks, const void* arguments, int64_t bytes,
                          const uint64_t* extents, int64_t count, char* report, int64_t room) {
    std::vector<twin::Extent> all;
    for (const uint64_t* e = extents; e < extents + 2 * count; e += 2) all.push_back(twin::Extent{e[0], e[0] + e[1]});
    const char* const packed = (const char*)arguments;
    const std::string said = twin::machine.launch(symbol, blocks, packed, (size_t)bytes, std::move(all));
    if (room > 0) {
        std::strncpy(report, said.c_str(), (size_t)room - 1);
        report[room - 1] = 0;
    }
    return said.empty() ? 0 : 1;
}

// Bytes of arguments of a kernel, -1: there is none of this name.
DI_OUT int64_t di_twin_arguments(const char* symbol) {
    const auto found = twin::kernels().find(symbol);
    return found == twin::kernels().end() ? -1 : (int64_t)found->second.bytes;
}

// What the cores did in the last launch: `Did` of the cube cores, then of the vector cores.
DI_OUT void di_twin_did(int64_t out[2 * twin::DIDS]) { std::memcpy(out, twin::machine.did, sizeof twin::machine.did); }
