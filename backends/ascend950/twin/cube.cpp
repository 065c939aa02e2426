// Matrix products out of L0A and L0B into L0C, and the fixpipe that brings results out.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "formats.h"
#include "machine.h"

using twin::machine;

namespace {

const int ROWS = 16, BLOCK = 32, FRACTAL = ROWS * BLOCK, RESULT_ROW = ROWS * 4;

int64_t offset_of(const void* p) { return (int64_t)(uintptr_t)p; }
int64_t up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// Elements k of `rows` rows as floats, [rows][k], from fractals of 16 rows and 32 bytes, blocks of columns outermost.
template <class T> void unpack(const uint8_t* from, int64_t rows, int64_t k, std::vector<float>& to) {
    to.resize((size_t)(rows * k));
    const int64_t per_byte = twin::codes_per_byte<T>(), c0 = BLOCK / (int64_t)sizeof(T) * per_byte;
    const int64_t groups = up(rows, ROWS);
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < k; ++c) {
            const uint8_t* row = from + ((c / c0) * groups + r / ROWS) * FRACTAL + (r % ROWS) * BLOCK;
            to[(size_t)(r * k + c)] = twin::number<T>(row, c % c0);
        }
    }
}

// Multiplies rows by their scales: 16 rows and 2 groups of 32 columns in each 32 bytes.
void scale(const uint8_t* scales, int64_t rows, int64_t k, std::vector<float>& values) {
    const int64_t pairs = k / 64;
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t g = 0; g < k / 32; ++g) {
            const float s = twin::e8m0(scales[((r / ROWS) * pairs + g / 2) * BLOCK + (r % ROWS) * 2 + g % 2]);
            for (int64_t c = g * 32; c < (g + 1) * 32; ++c) values[(size_t)(r * k + c)] *= s;
        }
    }
}

// An operand that one load brought only in part holds what an earlier product left there.
void one_load(const twin::Space& space, int64_t offset, int64_t bytes, const char* what) {
    const twin::Granule& first = space.shadow[(size_t)(offset / twin::GRANULE)];
    for (int64_t at = offset; at < offset + bytes; at += twin::GRANULE) {
        const twin::Granule& g = space.shadow[(size_t)(at / twin::GRANULE)];
        if (g.writer_epoch == first.writer_epoch) continue;
        machine.report("%s takes bytes of %s that different loads left there, of lines %d and %d", what,
                       twin::SPACE_NAMES[space.kind], first.writer_line, g.writer_line);
        return;
    }
}

template <class T>
void multiply(bool mx, float* c, const T* a, const T* b, int64_t m, int64_t k, int64_t n, int unit_flag, bool bias,
              bool zero, di_at at) {
    const char* const what = mx ? "asc_mmad_mx" : "asc_mmad";
    machine.issue(at);
    machine.need(true, what);
    if (m < 1 || k < 1 || n < 1) machine.stop("%s of %d x %d x %d", what, (int)m, (int)k, (int)n);
    if (bias) machine.stop("%s with a bias table, which is not used here", what);
    if (unit_flag != 0 && unit_flag != 2 && unit_flag != 3) machine.stop("%s with the unit flag %d", what, unit_flag);
    if (mx && k % 64) machine.stop("%s with k = %lld, allowed are multiples of 64", what, (long long)k);
    static std::vector<float> left, right, columns;
    const int64_t c0 = BLOCK / (int64_t)sizeof(T) * twin::codes_per_byte<T>(), steps = up(k, c0);
    const int start = mx ? 1024 : 512;
    machine.count(twin::DID_PRODUCTS, up(m, ROWS) * steps * up(n, ROWS));
    const int64_t a_at = offset_of(a), b_at = offset_of(b);
    const auto operand = [&](di_space which, int64_t offset, int64_t bytes, int align) {
        twin::Space& space = machine.space(which);
        const uint8_t* const p = machine.touch(space, offset, bytes, PIPE_M, false, true, align, what);
        one_load(space, offset, bytes, what);
        return p;
    };
    unpack<T>(operand(DI_SPACE_L0A, a_at, steps * up(m, ROWS) * FRACTAL, start), m, k, left);
    unpack<T>(operand(DI_SPACE_L0B, b_at, steps * up(n, ROWS) * FRACTAL, start), n, k, right);
    if (mx) {
        scale(operand(DI_SPACE_L0A_MX, a_at / 16, up(m, ROWS) * (k / 64) * BLOCK, BLOCK), m, k, left);
        scale(operand(DI_SPACE_L0B_MX, b_at / 16, up(n, ROWS) * (k / 64) * BLOCK, BLOCK), n, k, right);
    }
    const int64_t padded = up(m, ROWS) * ROWS;
    for (int64_t block = 0; block < up(n, ROWS); ++block) {
        const int64_t where = offset_of(c) + block * padded * RESULT_ROW;
        twin::Space& l0c = machine.space(DI_SPACE_L0C);
        if (!zero) machine.touch(l0c, where, m * RESULT_ROW, PIPE_M, false, true, block ? 64 : 1024, what);
        const int align = block ? 64 : 1024;
        float* out = (float*)machine.touch(l0c, where, padded * RESULT_ROW, PIPE_M, true, false, align, what);
        columns.assign((size_t)(k * ROWS), 0.0f);
        for (int64_t j = 0; j < ROWS && block * ROWS + j < n; ++j) {
            const float* const y = right.data() + (block * ROWS + j) * k;
            for (int64_t t = 0; t < k; ++t) columns[(size_t)(t * ROWS + j)] = y[t];
        }
        for (int64_t i = 0; i < padded; ++i) {
            float part[ROWS] = {};
            const float* const x = left.data() + i * k;
            for (int64_t t = 0; t < k && i < m; ++t) {
                const float* const y = columns.data() + t * ROWS;
                for (int j = 0; j < ROWS; ++j) part[j] += x[t] * y[j];
            }
            for (int j = 0; j < ROWS; ++j) out[i * ROWS + j] = zero ? part[j] : out[i * ROWS + j] + part[j];
        }
    }
}

}  // namespace

void asc_mmad(float* c, float* a, float* b, uint16_t m, uint16_t k, uint16_t n, uint8_t unit_flag, bool, bool bias,
              bool zero, di_at at) {
    multiply<float>(false, c, a, b, m, k, n, unit_flag, bias, zero, at);
}
void asc_mmad(float* c, bfloat16_t* a, bfloat16_t* b, uint16_t m, uint16_t k, uint16_t n, uint8_t unit_flag, bool,
              bool bias, bool zero, di_at at) {
    multiply<bfloat16_t>(false, c, a, b, m, k, n, unit_flag, bias, zero, at);
}
void asc_mmad_mx(float* c, fp8_e4m3fn_t* a, fp8_e4m3fn_t* b, uint16_t m, uint16_t k, uint16_t n, uint8_t unit_flag,
                 bool, bool bias, bool zero, di_at at) {
    multiply<fp8_e4m3fn_t>(true, c, a, b, m, k, n, unit_flag, bias, zero, at);
}
void asc_mmad_mx(float* c, fp4x2_e2m1_t* a, fp4x2_e2m1_t* b, uint16_t m, uint16_t k, uint16_t n, uint8_t unit_flag,
                 bool, bool bias, bool zero, di_at at) {
    multiply<fp4x2_e2m1_t>(true, c, a, b, m, k, n, unit_flag, bias, zero, at);
}

void asc_set_l0c2gm_nz2nd(uint64_t matrices, uint64_t, uint64_t, di_at at) {
    machine.issue(at);
    machine.need(true, "asc_set_l0c2gm_nz2nd");
    if (matrices != 1) machine.stop("fixpipe of %llu matrices, this interface copies 1", (unsigned long long)matrices);
    machine.core->nz2nd = true;
}

namespace {

// Row i, columns from .. to - 1 of the result, in the type of the destination.
void put(uint8_t* to, const uint8_t* l0c, int64_t src_stride, int64_t i, int64_t from, int64_t stop, int element,
         bool relu) {
    for (int64_t c = from; c < stop; ++c) {
        float v;
        std::memcpy(&v, l0c + ((c / ROWS) * src_stride + i) * RESULT_ROW + (c % ROWS) * 4, 4);
        if (relu) v = v > 0.0f ? v : 0.0f;
        if (element == 4) {
            std::memcpy(to + (c - from) * 4, &v, 4);
        } else {
            const uint16_t h = twin::to_bf16(v);
            std::memcpy(to + (c - from) * 2, &h, 2);
        }
    }
}

}  // namespace

void di_fixpipe(bool to_ub, void* dst, const void* src, int element, uint32_t n, uint32_t m, uint32_t dst_stride,
                uint32_t src_stride, int dual, int sub_block, int unit_flag, uint64_t quant, bool relu, bool nz2nd,
                di_at at) {
    const char* const what = to_ub ? "asc_copy_l0c2ub" : "asc_copy_l0c2gm";
    machine.issue(at);
    machine.need(true, what);
    if (!nz2nd || !machine.core->nz2nd) machine.stop("%s without asc_set_l0c2gm_nz2nd(1, 0, 0) and nz2nd", what);
    if (quant != (element == 4 ? (uint64_t)NoQuant : (uint64_t)F322BF16)) {
        machine.stop("%s with the conversion %llu to elements of %d bytes", what, (unsigned long long)quant, element);
    }
    if (unit_flag != 0 && unit_flag != 2 && unit_flag != 3) machine.stop("%s with the unit flag %d", what, unit_flag);
    if (!n || !m || src_stride < m) machine.stop("%s of %u x %u, %u rows to a column block", what, m, n, src_stride);
    if (to_ub && n % ROWS) machine.stop("%s of %u columns, allowed multiples of 16", what, n);
    if (to_ub && !machine.mixed()) machine.stop("%s in a kernel without vector cores", what);
    machine.count(twin::DID_COPIES, 1);
    machine.count(twin::DID_BYTES_OF_RESULTS, (int64_t)m * n * 4);
    twin::Space& l0c = machine.space(DI_SPACE_L0C);
    const uint8_t* base = nullptr;
    for (int64_t block = 0; block < up(n, ROWS); ++block) {
        const int64_t from = offset_of(src) + block * src_stride * RESULT_ROW;
        const uint8_t* p = machine.touch(l0c, from, m * RESULT_ROW, PIPE_FIX, false, true, 64, what);
        if (!block) base = p;
    }
    if (!to_ub) {
        for (uint32_t i = 0; i < m; ++i) {
            char* to = (char*)dst + (uint64_t)i * dst_stride * (unsigned)element;
            put(machine.global(to, (int64_t)n * element, PIPE_FIX, true), base, src_stride, i, 0, n, element, relu);
        }
        return;
    }
    const bool by_rows = dual == 1, by_columns = dual == 2;
    if (dual < 0 || dual > 2) machine.stop("%s with the mode %d for two destinations", what, dual);
    if ((by_rows && m % 2) || (by_columns && n % 32)) machine.stop("%s cannot halve %u x %u", what, m, n);
    for (int half_number = 0; half_number < (dual ? 2 : 1); ++half_number) {
        twin::Space& ub = machine.space_of(DI_SPACE_UB, 1 + (dual ? half_number : sub_block));
        const uint32_t row = by_rows ? half_number * m / 2 : 0, rows = by_rows ? m / 2 : m;
        const uint32_t column = by_columns ? half_number * n / 2 : 0, columns = by_columns ? n / 2 : n;
        for (uint32_t i = 0; i < rows; ++i) {
            const int64_t to = offset_of(dst) + (int64_t)i * dst_stride * element;
            put(machine.touch(ub, to, (int64_t)columns * element, PIPE_FIX, true, false, BLOCK, what), base, src_stride,
                row + i, column, column + columns, element, relu);
        }
    }
}
