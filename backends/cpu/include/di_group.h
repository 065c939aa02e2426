// Orders (row, slot) pairs by expert: a counting sort in four steps over the rows of an item. Pairs of one expert keep
// their order; an expert number outside 0 .. experts - 1 is a fault of the caller and goes to the last expert.
#ifndef DI_GROUP_H
#define DI_GROUP_H
#include "di_base.h"

namespace DI_ISA {

DI_INLINE int di_expert(int64_t e, int experts) { return e < 0 || e >= experts ? experts - 1 : (int)e; }

DI_INLINE void di_count_experts(int32_t* start, int experts) { memset(start, 0, (size_t)(experts + 1) * sizeof *start); }

template <class Pick>
DI_INLINE void di_add_experts(int32_t* start, int experts, const Pick* picks, int slots) {
    for (int s = 0; s < slots; ++s) ++start[di_expert(picks[s], experts) + 1];
}

// Counts become first places.
DI_INLINE void di_place_experts(int32_t* start, int experts) {
    for (int e = 0; e < experts; ++e) start[e + 1] += start[e];
}

// Afterwards start[e] is the place behind the last pair of expert e.
template <class Pick>
DI_INLINE void di_order_experts(int32_t* start, int32_t* order, int experts, const Pick* picks, int slots, int32_t first) {
    for (int s = 0; s < slots; ++s) order[start[di_expert(picks[s], experts)]++] = first + s;
}

}  // namespace DI_ISA

#endif
