// Copies between global memory, UB and L1, in the units in which the device counts them.
#include <cstring>

#include "machine.h"

using twin::machine;

namespace {

const uint32_t MOST_BURSTS = 4095, MOST_BYTES = 2097151, BLOCK = 32, FRACTAL_ROWS = 16;

int64_t offset_of(const void* p) { return (int64_t)(uintptr_t)p; }

void check_bursts(uint32_t n, uint32_t bytes, const char* what) {
    if (n < 1 || n > MOST_BURSTS) machine.stop("%s of %u bursts, allowed 1..%u", what, n, MOST_BURSTS);
    if (bytes < 1 || bytes > MOST_BYTES)
        machine.stop("%s of bursts of %u bytes, allowed 1..%u", what, bytes, MOST_BYTES);
}

void outside_vf(const char* what) {
    if (machine.core->in_vf) machine.stop("%s inside a vector function", what);
}

// Bytes that a copy leaves undefined.
void forget(twin::Space& space, int64_t offset, int64_t bytes) {
    for (int64_t i = offset; i < offset + bytes; ++i) {
        space.shadow[(size_t)(i / twin::GRANULE)].written &= ~(1u << (i % twin::GRANULE));
    }
}

}  // namespace

void di_gm2ub(void* dst, const void* src, uint32_t n, uint32_t bytes, uint32_t left, uint32_t right, bool constant,
              uint32_t element, uint64_t src_stride, uint32_t dst_stride, di_at at) {
    const char* const what = "asc_copy_gm2ub_align";
    machine.issue(at);
    outside_vf(what);
    machine.need(false, what);
    check_bursts(n, bytes, what);
    if (left > BLOCK || right > BLOCK) machine.stop("%s pads by %u and %u bytes, allowed 0..32", what, left, right);
    machine.count(twin::DID_COPIES, 1);
    machine.count(twin::DID_BYTES_IN, (int64_t)n * bytes);
    const uint32_t padded = left + bytes + right;
    if (n > 1 && dst_stride != bytes && dst_stride % BLOCK) {
        machine.stop("%s places bursts %u bytes apart, allowed their length or a multiple of 32", what, dst_stride);
    }
    if (n > 1 && dst_stride < padded) machine.stop("%s lays bursts of %u bytes %u apart", what, padded, dst_stride);
    twin::Space& ub = machine.space(DI_SPACE_UB);
    const bool packed = n > 1 && dst_stride == bytes && bytes % BLOCK;
    for (uint32_t i = 0; i < n; ++i) {
        const uint8_t* from = machine.global((const char*)src + i * src_stride, bytes, PIPE_MTE2, false);
        const int64_t to = offset_of(dst) + (int64_t)i * dst_stride;
        const uint32_t whole = packed ? padded : (padded + BLOCK - 1) / BLOCK * BLOCK;
        uint8_t* p = machine.touch(ub, to, whole, PIPE_MTE2, true, false, packed && i ? 1 : BLOCK, what);
        std::memcpy(p + left, from, bytes);
        forget(ub, to + padded, whole - padded);
        if (!constant) {
            forget(ub, to, left);
            forget(ub, to + left + bytes, right);
            continue;
        }
        for (uint32_t b = 0; b < left; ++b) p[b] = (uint8_t)(machine.core->pad >> 8 * (b % element));
        for (uint32_t b = 0; b < right; ++b) p[left + bytes + b] = (uint8_t)(machine.core->pad >> 8 * (b % element));
    }
}

void di_ub2gm(void* dst, const void* src, uint32_t n, uint32_t bytes, uint64_t dst_stride, uint32_t src_stride,
              di_at at) {
    const char* const what = "asc_copy_ub2gm_align";
    machine.issue(at);
    outside_vf(what);
    machine.need(false, what);
    check_bursts(n, bytes, what);
    if (n > 1 && src_stride != bytes && src_stride % BLOCK) {
        machine.stop("%s takes bursts %u bytes apart, allowed their length or a multiple of 32", what, src_stride);
    }
    machine.count(twin::DID_COPIES, 1);
    machine.count(twin::DID_BYTES_OUT, (int64_t)n * bytes);
    const bool packed = n > 1 && src_stride == bytes && bytes % BLOCK;
    for (uint32_t i = 0; i < n; ++i) {
        const uint8_t* from = machine.touch(machine.space(DI_SPACE_UB), offset_of(src) + (int64_t)i * src_stride, bytes,
                                            PIPE_MTE3, false, true, packed && i ? 1 : BLOCK, what);
        std::memcpy(machine.global((char*)dst + i * dst_stride, bytes, PIPE_MTE3, true), from, bytes);
    }
}

void di_set_pad(uint64_t value, di_at at) {
    machine.issue(at);
    machine.core->pad = value;
}

void asc_set_gm2ub_loop_size(uint32_t loop1, uint32_t loop2) {
    if (loop1 != 1 || loop2 != 1) machine.stop("loops of copies are not used here, found %u and %u", loop1, loop2);
}
void asc_set_ub2gm_loop_size(uint32_t loop1, uint32_t loop2) { asc_set_gm2ub_loop_size(loop1, loop2); }
void asc_set_gm2l1_loop_size(uint32_t loop1, uint32_t loop2) { asc_set_gm2ub_loop_size(loop1, loop2); }

void di_ub2l1(void* dst, const void* src, uint32_t n, uint32_t blocks, uint32_t src_gap, uint32_t dst_gap, di_at at) {
    const char* const what = "asc_copy_ub2l1";
    machine.issue(at);
    outside_vf(what);
    machine.need(false, what);
    if (!machine.mixed()) machine.stop("%s in a kernel without cube cores", what);
    check_bursts(n, blocks * BLOCK, what);
    machine.count(twin::DID_COPIES, 1);
    machine.count(twin::DID_BYTES_TO_L1, (int64_t)n * blocks * BLOCK);
    for (uint32_t i = 0; i < n; ++i) {
        const int64_t from = offset_of(src) + (int64_t)i * (blocks + src_gap) * BLOCK;
        const int64_t to = offset_of(dst) + (int64_t)i * (blocks + dst_gap) * BLOCK;
        const uint8_t* p = machine.touch(machine.space(DI_SPACE_UB), from, blocks * BLOCK, PIPE_MTE3, false, true,
                                         BLOCK, what);
        std::memcpy(machine.touch(machine.space_of(DI_SPACE_L1, 0), to, blocks * BLOCK, PIPE_MTE3, true, false, BLOCK,
                                  what), p, blocks * BLOCK);
    }
}

void asc_set_gm2l1_nz_para(uint64_t packed, di_at at) {
    machine.issue(at);
    machine.need(true, "asc_set_gm2l1_nz_para");
    machine.core->nz_para = packed;
}

// Row r, column c of the matrix goes to column block c / c0 of 32 bytes, row r of it. Columns are filled with zeros to
// 32 bytes; rows are not.
void di_gm2l1(void* dst, const void* src, uint64_t pitch, uint32_t rows, uint32_t columns, int element, bool by_column,
              di_at at) {
    const char* const what = by_column ? "asc_copy_gm2l1_dn2nz" : "asc_copy_gm2l1_nd2nz";
    machine.issue(at);
    machine.need(true, what);
    const uint64_t para = machine.core->nz_para;
    const int64_t matrices = para & 0xFFFF, row_step = (para >> 16) & 0xFFFF, block_rows = (para >> 32) & 0xFFFF;
    if (matrices != 1) machine.stop("%s of %lld matrices, this interface copies 1", what, (long long)matrices);
    if (rows < 1 || columns < 1) machine.stop("%s of %u x %u elements", what, rows, columns);
    machine.count(twin::DID_COPIES, 1);
    machine.count(twin::DID_BYTES_IN, (int64_t)rows * columns * element);
    twin::Space& l1 = machine.space(DI_SPACE_L1);
    const int64_t c0 = BLOCK / element;
    for (uint32_t r = 0; r < rows && !by_column; ++r) {  // all of a row's bytes at once, for speed
        machine.global((const char*)src + r * pitch, (int64_t)columns * element, PIPE_MTE2, false);
    }
    for (uint32_t c = 0; c < columns && by_column; ++c) {
        machine.global((const char*)src + c * pitch, (int64_t)rows * element, PIPE_MTE2, false);
    }
    for (int64_t block = 0; block * c0 < (int64_t)columns; ++block) {
        for (uint32_t r = 0; r < rows; ++r) {
            const int64_t to = offset_of(dst) + (block * block_rows + r * row_step) * BLOCK;
            uint8_t* p = machine.touch(l1, to, BLOCK, PIPE_MTE2, true, false, BLOCK, what);
            std::memset(p, 0, BLOCK);
            for (int64_t c = block * c0; c < (int64_t)columns && c < (block + 1) * c0; ++c) {
                const char* from = (const char*)src + (by_column ? (uint64_t)c * pitch + r * (uint64_t)element
                                                                 : r * pitch + (uint64_t)c * (uint64_t)element);
                std::memcpy(p + (c - block * c0) * element, from, (size_t)element);
            }
        }
    }
}

void di_fill_l1(void* dst, uint64_t value, int element, const asc_fill_value_config& how, di_at at) {
    const char* const what = "asc_fill_l1";
    machine.issue(at);
    machine.need(true, what);
    if (!how.repeat || !how.blk_num) machine.stop("%s of nothing", what);
    // Whether it runs on MTE1 or MTE2 is not said: only a barrier over all pipes orders it.
    for (uint32_t i = 0; i < how.repeat; ++i) {
        const int64_t to = offset_of(dst) + (int64_t)i * (how.blk_num + how.dst_gap) * BLOCK;
        uint8_t* p = machine.touch(machine.space(DI_SPACE_L1), to, how.blk_num * BLOCK, PIPE_S, true, false, BLOCK,
                                   what);
        for (uint32_t b = 0; b < how.blk_num * BLOCK; ++b) p[b] = (uint8_t)(value >> 8 * (b % (unsigned)element));
    }
}

void di_l12l0(di_space to, const void* dst, const void* src, uint32_t row, uint32_t column, uint32_t rows,
              uint32_t columns, uint32_t src_stride, uint32_t dst_stride, di_at at) {
    const char* const what = to == DI_SPACE_L0A ? "asc_copy_l12l0a" : "asc_copy_l12l0b";
    const int64_t fractal = FRACTAL_ROWS * BLOCK;
    machine.issue(at);
    machine.need(true, what);
    if (!rows || !columns) machine.stop("%s of nothing", what);
    machine.count(twin::DID_COPIES, 1);
    machine.count(twin::DID_BYTES_TO_L0, rows * columns * fractal);
    for (uint32_t k = 0; k < columns; ++k) {
        const int64_t from = offset_of(src) + ((int64_t)(column + k) * src_stride + row) * fractal;
        const int64_t where = offset_of(dst) + (int64_t)k * dst_stride * fractal;
        const uint8_t* p = machine.touch(machine.space(DI_SPACE_L1), from, rows * fractal, PIPE_MTE1, false, true,
                                         BLOCK, what);
        std::memcpy(machine.touch(machine.space(to), where, rows * fractal, PIPE_MTE1, true, false, (int)fractal, what),
                    p, (size_t)(rows * fractal));
    }
}

void di_l12l0_mx(di_space to, uint64_t dst, const void* src, uint32_t x, uint32_t y, uint32_t x_step, uint32_t y_step,
                 uint32_t src_stride, uint32_t dst_stride, di_at at) {
    const char* const what = to == DI_SPACE_L0A_MX ? "asc_copy_l12l0a_mx" : "asc_copy_l12l0b_mx";
    machine.issue(at);
    machine.need(true, what);
    if (!x_step || !y_step) machine.stop("%s of nothing", what);
    machine.count(twin::DID_COPIES, 1);
    machine.count(twin::DID_BYTES_TO_L0, (int64_t)x_step * y_step * BLOCK);
    for (uint32_t i = 0; i < x_step; ++i) {
        const int64_t from = offset_of(src) + ((int64_t)(x + i) * src_stride + y) * BLOCK;
        const int64_t where = (int64_t)dst + (int64_t)i * dst_stride * BLOCK;
        const uint8_t* p = machine.touch(machine.space(DI_SPACE_L1), from, y_step * BLOCK, PIPE_MTE1, false, true,
                                         BLOCK, what);
        std::memcpy(machine.touch(machine.space(to), where, y_step * BLOCK, PIPE_MTE1, true, false, BLOCK, what), p,
                    y_step * BLOCK);
    }
}
