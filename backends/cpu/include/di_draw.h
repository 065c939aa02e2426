// From a row of logits to a token. What is computed, and in which order, is said in runtime/sampling.py; this is the
// same in one pass where nothing is edited, and in a few where tokens are banned, penalised or cut off.
#ifndef DI_DRAW_H
#define DI_DRAW_H
#include "di_draw_math.h"

namespace DI_ISA {

enum { DI_NOT_FINITE = -1, DI_NOTHING_LEFT = -2 };  // instead of a token
enum { DI_ANSWERED = 0x7fffffff };                  // of a count; the bit above: the prompt holds the token

// Memory of one draw over n tokens: what is left of each token, the same of the drafter, weights, and a list of ids.
struct DiDrawScratch {
    double *z, *q, *w;
    int32_t* ids;
};

DI_INLINE DiDrawScratch di_draw_scratch(char* at, int64_t n) {
    const int64_t lane = (n + 15) / 16 * 16;
    double* const z = (double*)at;
    return DiDrawScratch{z, z + lane, z + 2 * lane, (int32_t*)(z + 3 * lane)};
}

// ---- steps 1 and 2: bans, bias, penalties ---------------------------------------------------------------------------
// `bare`: what does not depend on the tokens behind the last one that is counted; so drafts are made.
DI_INLINE bool di_penalised(const DiSampling* how) {
    return how->repetition != 1.0 || how->frequency != 0.0 || how->presence != 0.0;
}

DI_INLINE bool di_completes(const DiDraw* d, const int64_t* word, int64_t length) {
    if (d->answered < length - 1) return false;
    for (int64_t i = 0; i + 1 < length; ++i) {
        if (d->recent[i - (length - 1)] != word[i]) return false;
    }
    return true;
}

DI_INLINE bool di_edits(const DiDraw* d, bool bare) {
    const DiSampling* const how = d->how;
    if (how->allowed || how->num_bias || di_penalised(how)) return true;
    return !bare && (d->mask || how->num_bad || d->answered < how->min_tokens);
}

DI_INLINE double di_penalty(const DiSampling* how, double z, bool prompt, uint32_t count) {
    if (how->repetition != 1.0 && (prompt || count)) z = z > 0 ? z / how->repetition : z * how->repetition;
    return count ? z - (how->frequency * count + how->presence) : z;
}

static inline void di_penalise(const DiDraw* d, bool bare, int64_t n, double* z) {
    enum { MOST = 64 };
    const int32_t extra = bare ? 0 : d->uncounted < MOST ? d->uncounted : MOST;
    const int64_t* const drafts = d->recent - extra;
    double before[MOST];
    for (int32_t i = 0; i < extra; ++i) before[i] = z[drafts[i]];
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t c = d->counts[i];
        if (c) z[i] = di_penalty(d->how, z[i], c >> 31, c & DI_ANSWERED);
    }
    for (int32_t i = 0; i < extra; ++i) {
        uint32_t more = 0;
        for (int32_t k = 0; k < extra; ++k) more += drafts[k] == drafts[i];
        const uint32_t c = d->counts[drafts[i]];
        z[drafts[i]] = di_penalty(d->how, before[i], c >> 31, (c & DI_ANSWERED) + more);
    }
}

static inline void di_edit(const DiDraw* d, const float* l, bool bare, int64_t n, double* z) {
    const DiSampling* const how = d->how;
    if (how->allowed) {
        for (int64_t i = 0; i < n; ++i) z[i] = -HUGE_VAL;
        for (int64_t i = 0; i < how->num_allowed; ++i) z[how->allowed[i]] = l[how->allowed[i]];
    } else {
        for (int64_t i = 0; i < n; ++i) z[i] = l[i];
    }
    if (!bare) {
        for (int64_t i = 0; d->mask && i < n; i += 32) {
            const uint32_t word = d->mask[i / 32];
            for (int64_t k = 0; word != 0xffffffffu && k < 32 && i + k < n; ++k) {
                if (!(word >> k & 1)) z[i + k] = -HUGE_VAL;
            }
        }
        for (int64_t i = 0; i < how->num_bad; ++i) {
            const int64_t* const word = how->bad + how->bad_first[i];
            const int64_t length = how->bad_first[i + 1] - how->bad_first[i];
            if (di_completes(d, word, length)) z[word[length - 1]] = -HUGE_VAL;
        }
        for (int64_t i = 0; d->answered < how->min_tokens && i < how->num_ends; ++i) {
            if (how->ends[i] < n) z[how->ends[i]] = -HUGE_VAL;
        }
    }
    for (int64_t i = 0; i < how->num_bias; ++i) z[how->bias_ids[i]] += how->bias[i];
    if (di_penalised(how)) di_penalise(d, bare, n, z);
}

// ---- step 3: temperature, and the leading part that stays -----------------------------------------------------------
// In the order (z falling, index rising) the first tokens of which there are `count` and whose weights sum to `mass`.
struct DiCut {
    int64_t count;
    double mass;
    bool reached(const DiSum& s) const { return s.count >= count && s.sum >= mass; }
};

// Strictly between lo and hi, or hi when nothing is.
DI_INLINE double di_middle(double lo, double hi) {
    const double mid = lo + (hi - lo) * 0.5;
    return mid > lo && mid < hi ? mid : hi;
}

// Everything behind the cut, which all tokens together reach, becomes -inf. `top`: the largest z; `w`: weights
// exp(z - top).
static inline void di_keep(double* z, const double* w, int64_t n, double top, DiCut cut, int32_t* ids) {
    double hi = top, lo = top - 2.0;
    DiSum high{0, 0.0}, low = di_above(z, w, n, lo);  // of the tokens above hi, and above lo
    for (double down = 8.0; !cut.reached(low); down *= 4.0) {
        hi = lo;
        high = low;
        lo = top - down;
        low = di_above(z, w, n, lo);
    }
    // Halve what the cut lies in, over all tokens while it holds many of them. Equal values cannot be parted.
    while (low.count - high.count > di_max64(n / DI_LISTED, DI_SORTED)) {
        const double mid = di_middle(lo, hi);
        if (mid == hi) break;
        const DiSum s = di_above(z, w, n, mid);
        const bool above = cut.reached(s);
        (above ? lo : hi) = mid;
        (above ? low : high) = s;
    }
    int64_t found = di_between(z, n, lo, hi, ids);
    while (found > DI_SORTED) {
        const double mid = di_middle(lo, hi);
        if (mid == hi) break;
        DiSum s = high;
        for (int64_t i = 0; i < found; ++i) {
            s.count += z[ids[i]] > mid;
            s.sum += z[ids[i]] > mid ? w[ids[i]] : 0.0;
        }
        const bool above = cut.reached(s);
        int64_t left = 0;
        for (int64_t i = 0; i < found; ++i) {  // without branches: nobody could guess them
            const int32_t id = ids[i];
            ids[left] = id;
            left += (z[id] > mid) == above;
        }
        if (above) {
            lo = mid;
        } else {
            hi = mid;
            high = s;
        }
        found = left;
    }
    if (found <= DI_SORTED) di_sort_falling(ids, found, z);
    int64_t last = 0;
    for (; last < found; ++last) {
        high.count += 1;
        high.sum += w[ids[last]];
        if (cut.reached(high)) break;
    }
    const int32_t id = ids[last < found ? last : found - 1];
    const double bound = z[id];
    for (int64_t i = 0; i < n; ++i) z[i] = z[i] > bound || (z[i] == bound && i <= id) ? z[i] : -HUGE_VAL;
}

DI_INLINE bool di_filters(const DiSampling* how, int64_t n) {
    return (how->top_k > 0 && how->top_k < n) || how->top_p < 1.0 || how->min_p > 0.0;
}

// Leaves of z, which is divided by the temperature, the tokens to draw from.
static inline void di_filter(const DiSampling* how, int64_t n, double top, const DiDrawScratch& s) {
    double* const z = s.z;
    if (!di_filters(how, n) || !di_is_finite(top)) return;
    if (how->top_k > 0 && how->top_k < n && di_above(z, z, n, -HUGE_VAL).count >= how->top_k) {
        di_keep(z, z, n, top, DiCut{how->top_k, -HUGE_VAL}, s.ids);
    }
    if (how->top_p == 1.0 && how->min_p == 0.0) return;
    for (int64_t i = 0; i < n; ++i) s.w[i] = di_exp64(z[i] - top);
    if (how->top_p < 1.0) {
        const double all = di_above(z, s.w, n, -HUGE_VAL).sum;
        di_keep(z, s.w, n, top, DiCut{1, how->top_p * all}, s.ids);
    }
    if (how->min_p > 0.0) {
        for (int64_t i = 0; i < n; ++i) z[i] = s.w[i] >= how->min_p || z[i] == top ? z[i] : -HUGE_VAL;
    }
}

// Steps 1 to 3. Returns the largest z; -inf: no token is left.
static inline double di_left(const DiDraw* d, const float* l, bool bare, int64_t n, const DiDrawScratch& s) {
    const double t = d->how->temperature;
    if (di_edits(d, bare)) {
        di_edit(d, l, bare, n, s.z);
        for (int64_t i = 0; i < n; ++i) s.z[i] = s.z[i] / t;
    } else {
        for (int64_t i = 0; i < n; ++i) s.z[i] = (double)l[i] / t;
    }
    const double top = di_greatest(s.z, n);
    di_filter(d->how, n, top, s);
    return top;
}

// ---- step 4, and judging a draft ------------------------------------------------------------------------------------
DI_INLINE uint64_t di_purpose_key(const DiDraw* d) {
    uint64_t key = d->how->key;
    if (d->noise != DI_NOISE_SHARED) key = di_key(key, (uint64_t)d->noise);
    if (d->noise == DI_NOISE_DRAFT) key = di_key(key, (uint64_t)d->round);
    return key;
}

DI_INLINE uint64_t di_noise_key(const DiDraw* d, int64_t position) {
    return di_key(di_purpose_key(d), (uint64_t)position);
}

// Accepts a draft x with probability p(x) / q(x), else draws from what p has more than q: the result is a draw from p.
static inline int64_t di_judged(const DiDraw* d, const float* l, int64_t n, int64_t position, DiDrawScratch s) {
    double* const p = s.z;
    const double top = di_left(d, l, false, n, s);
    if (!di_is_finite(top)) return DI_NOTHING_LEFT;
    const uint64_t key = di_noise_key(d, position);
    const DiTop drafts = di_largest(d->drafted, n);
    if (!drafts.number || !di_is_finite((double)drafts.value)) return di_drawn(DiWide{p}, n, key);
    DiDrawScratch other = s;
    other.z = s.q;
    const double peak = di_left(d, d->drafted, true, n, other);
    if (!di_is_finite(peak)) return di_drawn(DiWide{p}, n, key);
    const int64_t x = d->draft;
    for (int64_t i = 0; i < n; ++i) s.w[i] = di_exp64(s.q[i] - peak);
    const double whole = di_above(s.q, s.w, n, -HUGE_VAL).sum;
    const double qx = s.w[x] / whole;
    for (int64_t i = 0; i < n; ++i) s.q[i] = s.w[i] / whole;
    for (int64_t i = 0; i < n; ++i) s.w[i] = di_exp64(p[i] - top);
    const double all = di_above(p, s.w, n, -HUGE_VAL).sum;
    const uint64_t decision = di_key(di_key(d->how->key, DI_NOISE_DECISION), (uint64_t)position);
    if (di_uniform(decision) * qx < s.w[x] / all) return x;
    for (int64_t i = 0; i < n; ++i) s.q[i] = s.w[i] / all - s.q[i];
    for (int64_t i = 0; i < n; ++i) s.q[i] = s.q[i] > 0 ? log(s.q[i]) : -HUGE_VAL;
    const int64_t token = di_drawn(DiWide{s.q}, n, key);
    return token >= 0 ? token : di_drawn(DiWide{p}, n, key);
}

// The token at `position`, from the row before it.
static inline int64_t di_chosen(const DiDraw* d, const float* l, int64_t n, int64_t position, char* scratch) {
    const DiTop top = di_largest(l, n);
    if (!top.number || !di_is_finite((double)top.value)) return DI_NOT_FINITE;
    const DiSampling* const how = d->how;
    if (!how) return top.id;
    const bool greedy = how->temperature == 0.0, edits = di_edits(d, d->bare);
    if (greedy && !edits) return top.id;
    const uint64_t key = di_noise_key(d, position);
    if (d->mode == DI_DRAW_JUDGE && !greedy) return di_judged(d, l, n, position, di_draw_scratch(scratch, n));
    const double t = how->temperature;
    if (!edits && !di_filters(how, n) && t > 1e-3) return di_drawn(DiPlain{l, t, (float)(1.0 / t)}, n, key);
    const DiDrawScratch s = di_draw_scratch(scratch, n);
    if (greedy) {
        di_edit(d, l, d->bare, n, s.z);
        const int64_t first = di_first_of(s.z, n);
        return di_is_finite(s.z[first]) ? first : (int64_t)DI_NOTHING_LEFT;
    }
    const double left = di_left(d, l, d->bare, n, s);
    if (!(left > -HUGE_VAL)) return DI_NOTHING_LEFT;
    if (di_filters(how, n)) {
        const int64_t kept = di_between(s.z, n, -HUGE_VAL, HUGE_VAL, s.ids);
        if (kept <= n / DI_SOME) return di_drawn(DiListed{s.z, s.ids}, kept, key);
    }
    return di_drawn(DiWide{s.z}, n, key);
}

// ---- log-probabilities of the logits as the model gives them --------------------------------------------------------
static inline void di_report(const DiDraw* d, const float* l, int64_t n, int64_t token) {
    const float top = di_largest(l, n).value;
    const double base = (double)top + log(di_sum_exp(l, n, top));
    int64_t above = 0;
    for (int64_t i = 0; i < n; ++i) above += l[i] > l[token];
    d->ids[0] = token;
    d->logprobs[0] = (double)l[token] - base;
    d->ranks[0] = (int32_t)above + 1;
    int32_t have = 0;
    const int32_t most = (int32_t)di_min64(d->top, n);
    int64_t* const ids = d->ids + 1;
    for (int64_t i = 0; i < n && most > 0; ++i) {
        if (have == most && !(l[i] > l[ids[have - 1]])) continue;
        int32_t at = have < most ? have++ : have - 1;
        for (; at > 0 && l[i] > l[ids[at - 1]]; --at) ids[at] = ids[at - 1];
        ids[at] = i;
    }
    for (int32_t k = 0; k < have; ++k) {
        d->logprobs[k + 1] = (double)l[ids[k]] - base;
        d->ranks[k + 1] = k && l[ids[k]] == l[ids[k - 1]] ? d->ranks[k] : k + 1;
    }
}

// What the kernels of the family call for one row.
static inline int64_t di_draw_row(const DiDraw* d, const float* l, int64_t n, int64_t position, char* scratch) {
    if (!d) return di_largest(l, n).id;
    if (d->mode == DI_DRAW_NONE) return 0;
    if (d->bare) return di_max64(0, di_chosen(d, l, n, position, scratch));  // the graph goes on with some token
    int64_t token = d->draft;
    if (d->mode != DI_DRAW_GIVEN) {
        token = di_chosen(d, l, n, position, scratch);
    } else {
        const DiTop top = di_largest(l, n);
        if (!top.number || !di_is_finite((double)top.value)) return DI_NOT_FINITE;
    }
    if (token >= 0 && d->logprobs) di_report(d, l, n, token);
    return token;
}

}  // namespace DI_ISA

#endif
