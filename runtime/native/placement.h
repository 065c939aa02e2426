// Where the threads of an engine run and on which memory nodes its pages lie. Wishes of the machine's owner: an engine
// computes the same anywhere.
#ifndef DEEPINFER_PLACEMENT_H
#define DEEPINFER_PLACEMENT_H
#include <cstdint>

#include "abi.h"

enum { DI_MEMORY_DEFAULT = 0, DI_MEMORY_INTERLEAVED = 1 };

#ifdef __cplusplus
extern "C" {
#endif
// Thread i of later runs keeps to processor cpus[i % count]; count 0 takes the wish back.
int di_place(DiEngine*, const int32_t* cpus, int32_t count);
// Policy of pages that the calling thread touches first from now on; `nodes`: memory nodes of the machine. On a machine
// with one node nothing is done.
int di_memory_policy(int32_t policy, int32_t* nodes);
#ifdef __cplusplus
}
#endif
#endif
