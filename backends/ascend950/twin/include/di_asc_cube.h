// The cube side of the interface: L1, L0 and fixpipe. Strides and steps as the device counts them.
#ifndef DI_ASC_CUBE_H
#define DI_ASC_CUBE_H

enum : uint64_t { NoQuant = 0, F322F16 = 1, F322BF16 = 16 };

void asc_set_gm2l1_nz_para(uint64_t packed, di_at at = di_here());
void asc_set_l0c2gm_nz2nd(uint64_t nd_num, uint64_t src_nd_stride, uint64_t dst_nd_stride, di_at at = di_here());
void di_gm2l1(void* dst, const void* src, uint64_t pitch, uint32_t rows, uint32_t columns, int element, bool by_column,
              di_at at);
template <class T>
void asc_copy_gm2l1_nd2nz(__cbuf__ T* dst, const __gm__ T* src, uint64_t row_pitch, uint8_t l2, uint16_t rows,
                          uint32_t columns, uint64_t nd_pitch, bool small_c0, di_at at = di_here())
    DI_BODY((void)l2, (void)nd_pitch, (void)small_c0;
    di_gm2l1(dst, src, row_pitch, rows, columns, sizeof(T), false, at);)
template <class T>
void asc_copy_gm2l1_dn2nz(__cbuf__ T* dst, const __gm__ T* src, uint64_t row_pitch, uint8_t l2, uint16_t rows,
                          uint32_t columns, uint64_t nd_pitch, bool small_c0, di_at at = di_here())
    DI_BODY((void)l2, (void)nd_pitch, (void)small_c0;
    di_gm2l1(dst, src, row_pitch, rows, columns, sizeof(T), true, at);)
void di_ub2l1(void* dst, const void* src, uint32_t n, uint32_t blocks, uint32_t src_gap, uint32_t dst_gap, di_at at);
template <class T>
void asc_copy_ub2l1(__cbuf__ T* dst, const __ubuf__ T* src, uint16_t n_burst, uint16_t len_burst, uint16_t src_gap,
                    uint16_t dst_gap, di_at at = di_here())
    DI_BODY(di_ub2l1(dst, src, n_burst, len_burst, src_gap, dst_gap, at);)
struct asc_fill_value_config {
    uint16_t repeat, blk_num, dst_gap;  // blocks are 32 bytes
};
void di_fill_l1(void* dst, uint64_t bits, int element, const asc_fill_value_config& how, di_at at);
template <class T, class V>
void asc_fill_l1(__cbuf__ T* dst, V value, const asc_fill_value_config& how, di_at at = di_here())
    DI_BODY(uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(V));
    di_fill_l1(dst, bits, sizeof(V), how, at);)
// Fractals of 16 rows and 32 bytes; for scales of 16 rows and 2 bytes.
void di_l12l0(di_space to, const void* dst, const void* src, uint32_t row, uint32_t column, uint32_t rows,
              uint32_t columns, uint32_t src_stride, uint32_t dst_stride, di_at at);
void di_l12l0_mx(di_space to, uint64_t dst, const void* src, uint32_t x, uint32_t y, uint32_t x_step, uint32_t y_step,
                 uint32_t src_stride, uint32_t dst_stride, di_at at);
template <class T>
void asc_copy_l12l0a(__ca__ T* dst, const __cbuf__ T* src, uint16_t m_start, uint16_t k_start, uint8_t m_step,
                     uint8_t k_step, int16_t src_stride, uint16_t dst_stride, di_at at = di_here())
    DI_BODY(di_l12l0(DI_SPACE_L0A, dst, src, m_start, k_start, m_step, k_step, (uint32_t)src_stride, dst_stride, at);)
template <class T>
void asc_copy_l12l0b(__cb__ T* dst, const __cbuf__ T* src, uint16_t n_start, uint16_t k_start, uint8_t n_step,
                     uint8_t k_step, int16_t src_stride, uint16_t dst_stride, di_at at = di_here())
    DI_BODY(di_l12l0(DI_SPACE_L0B, dst, src, n_start, k_start, n_step, k_step, (uint32_t)src_stride, dst_stride, at);)
template <class T>
void asc_copy_l12l0a_mx(uint64_t dst, const __cbuf__ T* src, uint16_t x_start, uint16_t y_start, uint8_t x_step,
                        uint8_t y_step, uint16_t src_stride, uint16_t dst_stride, di_at at = di_here())
    DI_BODY(di_l12l0_mx(DI_SPACE_L0A_MX, dst, src, x_start, y_start, x_step, y_step, src_stride, dst_stride, at);)
template <class T>
void asc_copy_l12l0b_mx(uint64_t dst, const __cbuf__ T* src, uint16_t x_start, uint16_t y_start, uint8_t x_step,
                        uint8_t y_step, uint16_t src_stride, uint16_t dst_stride, di_at at = di_here())
    DI_BODY(di_l12l0_mx(DI_SPACE_L0B_MX, dst, src, x_start, y_start, x_step, y_step, src_stride, dst_stride, at);)

// c [m, n] += or = a [m, k] times the rows of b [n, k]. unit_flag: 0, or 2 and on the last step 3.
#define DI_MMAD(NAME, TYPE) \
    void NAME(__cc__ float* c, __ca__ TYPE* a, __cb__ TYPE* b, uint16_t m, uint16_t k, uint16_t n, uint8_t unit_flag, \
              bool disable_gemv, bool c_from_bias, bool c_init_zero, di_at at = di_here());
DI_MMAD(asc_mmad, float)
DI_MMAD(asc_mmad, bfloat16_t)
DI_MMAD(asc_mmad_mx, fp8_e4m3fn_t)
DI_MMAD(asc_mmad_mx, fp4x2_e2m1_t)
#undef DI_MMAD

void di_fixpipe(bool to_ub, void* dst, const void* src, int element, uint32_t n, uint32_t m, uint32_t dst_stride,
                uint32_t src_stride, int dual, int sub_block, int unit_flag, uint64_t quant, bool relu, bool nz2nd,
                di_at at);
template <class T>
void asc_copy_l0c2gm(__gm__ T* dst, __cc__ float* src, uint16_t n, uint16_t m, uint32_t dst_stride,
                     uint16_t src_stride, uint8_t l2, uint8_t clip, uint8_t unit_flag, uint64_t quant_pre,
                     uint8_t relu, bool split, bool nz2nd, uint64_t quant_post, uint8_t relu_post, bool clip_post,
                     uint8_t eltwise, bool antiquant, bool c0_pad, bool broadcast, bool nz2dn, di_at at = di_here())
    DI_BODY((void)l2, (void)clip, (void)split, (void)quant_post, (void)relu_post, (void)clip_post, (void)eltwise;
    (void)antiquant, (void)c0_pad, (void)broadcast, (void)nz2dn;
    di_fixpipe(false, dst, src, sizeof(T), n, m, dst_stride, src_stride, 0, 0, unit_flag, quant_pre, relu != 0, nz2nd,
               at);)
template <class T>
void asc_copy_l0c2ub(__ubuf__ T* dst, __cc__ float* src, uint16_t n, uint16_t m, uint32_t dst_stride,
                     uint16_t src_stride, uint8_t dual, bool sub_block, uint8_t clip, uint8_t unit_flag,
                     uint64_t quant_pre, uint8_t relu, bool split, bool nz2nd, uint64_t quant_post, uint8_t relu_post,
                     bool clip_post, uint8_t eltwise, bool antiquant, bool c0_pad, bool broadcast, bool nz2dn,
                     di_at at = di_here())
    DI_BODY((void)clip, (void)split, (void)quant_post, (void)relu_post, (void)clip_post, (void)eltwise;
    (void)antiquant, (void)c0_pad, (void)broadcast, (void)nz2dn;
    di_fixpipe(true, dst, src, sizeof(T), n, m, dst_stride, src_stride, dual, sub_block, unit_flag, quant_pre,
               relu != 0, nz2nd, at);)
#endif
