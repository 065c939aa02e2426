// Softmax pooling of the raw rows of a group.
#ifndef DI_POOL_H
#define DI_POOL_H
#include "di_math.h"
#include "di_state.h"

namespace DI_ISA {

// Per feature d < DIM: sum over the group's rows of softmax(gate) * value. Rows are [values | gates]; with OVERLAP they
// are twice as wide, and the lower half of the previous group's rows joins the upper half of the own ones. Rows before
// position 0 have no weight. `pos`: first position of the group.
template <int RATIO, int DIM, bool OVERLAP>
static inline void di_pool(const DiStep* step, const DiState* st, int32_t s, int64_t pos, float* __restrict out) {
    enum { WIDTH = OVERLAP ? 2 * DIM : DIM, ROWS = OVERLAP ? 2 * RATIO : RATIO, PIECE = 64 };
    const float* values[ROWS];
    int rows = 0;
    for (int t = 0; t < ROWS; ++t) {
        const int64_t p = pos + t - (ROWS - RATIO);
        if (p < 0) continue;
        const float* const r = (const float*)di_view(step, st, s, p);
        values[rows++] = r + (OVERLAP && t >= RATIO ? DIM : 0);
    }
    for (int d = 0; d < DIM; d += PIECE) {
        const int n = DIM - d < PIECE ? DIM - d : PIECE;
        float top[PIECE], below[PIECE], sum[PIECE];
        for (int i = 0; i < n; ++i) {
            top[i] = values[0][d + WIDTH + i];
            below[i] = sum[i] = 0.0f;
        }
        for (int t = 1; t < rows; ++t) {
            for (int i = 0; i < n; ++i) top[i] = di_max(top[i], values[t][d + WIDTH + i]);
        }
        for (int t = 0; t < rows; ++t) {
            for (int i = 0; i < n; ++i) {
                const float e = di_exp(values[t][d + WIDTH + i] - top[i]);
                below[i] += e;
                sum[i] += e * values[t][d + i];
            }
        }
        for (int i = 0; i < n; ++i) out[d + i] = sum[i] / below[i];
    }
}

}  // namespace DI_ISA

#endif
