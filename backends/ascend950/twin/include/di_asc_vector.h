// Vector functions: registers of 256 bytes, masks with one bit a byte, loads and stores of UB. Lanes that a mask leaves
// out become 0. Every lane knows whether it was ever written; what is not written may be moved but not used.
#ifndef DI_ASC_VECTOR_H
#define DI_ASC_VECTOR_H

template <class T> struct di_register_of {
    static const int LANES = 256 / sizeof(T);
    alignas(64) T lane[LANES];
    uint64_t undefined[4];  // a bit for each byte, used at the first byte of a lane
};
typedef di_register_of<float> vector_float;
typedef di_register_of<int32_t> vector_int32_t;
typedef di_register_of<uint32_t> vector_uint32_t;
typedef di_register_of<int16_t> vector_int16_t;
typedef di_register_of<uint16_t> vector_uint16_t;
typedef di_register_of<int8_t> vector_int8_t;
typedef di_register_of<uint8_t> vector_uint8_t;
typedef di_register_of<bfloat16_t> vector_bfloat16_t;
typedef di_register_of<half> vector_half;
typedef di_register_of<fp8_e4m3fn_t> vector_fp8_e4m3fn_t;
struct vector_bool {
    uint64_t bit[4];
};

void di_vf_begin();
void di_vf_end();
template <auto F, class... A> void asc_vf_call(A... arguments) {
    di_vf_begin();
    F(arguments...);
    di_vf_end();
}

// The same bits as lanes of another type.
template <class To, class From> To di_as(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "registers have one size");
    To to;
    __builtin_memcpy((void*)&to, (const void*)&from, sizeof to);
    if constexpr (sizeof(to.lane[0]) < sizeof(from.lane[0])) {  // every part of an undefined lane is undefined
        for (unsigned step = sizeof(to.lane[0]); step < sizeof(from.lane[0]); step *= 2) {
            for (int w = 0; w < 4; ++w) to.undefined[w] |= to.undefined[w] << step;
        }
    } else if constexpr (sizeof(to.lane[0]) > sizeof(from.lane[0])) {  // a lane with an undefined part is undefined
        for (unsigned step = sizeof(from.lane[0]); step < sizeof(to.lane[0]); step *= 2) {
            for (int w = 0; w < 4; ++w) to.undefined[w] |= to.undefined[w] >> step;
        }
    }
    return to;
}

// ---- masks --------------------------------------------------------------------------------------------------------
enum di_pattern {
    PAT_ALLF, PAT_ALL, PAT_VL1, PAT_VL2, PAT_VL3, PAT_VL4, PAT_VL8, PAT_VL16, PAT_VL32, PAT_VL64, PAT_VL128, PAT_H,
    PAT_Q
};
vector_bool asc_create_mask_b8(di_pattern pattern);
vector_bool asc_create_mask_b16(di_pattern pattern);
vector_bool asc_create_mask_b32(di_pattern pattern);
vector_bool asc_update_mask_b8(uint32_t& count);
vector_bool asc_update_mask_b16(uint32_t& count);
vector_bool asc_update_mask_b32(uint32_t& count);
void asc_mask_and(vector_bool& dst, vector_bool a, vector_bool b, vector_bool mask);
void asc_mask_or(vector_bool& dst, vector_bool a, vector_bool b, vector_bool mask);
void asc_mask_xor(vector_bool& dst, vector_bool a, vector_bool b, vector_bool mask);
void asc_mask_not(vector_bool& dst, vector_bool a, vector_bool mask);

// ---- UB and registers ---------------------------------------------------------------------------------------------
enum di_memory_order { VST_VLD, VLD_VST, VST_VST };
void asc_mem_bar(di_memory_order order);

// The types that lanes of memory have.
#define DI_LANES(X) X(float) X(int32_t) X(uint32_t) X(int16_t) X(uint16_t) X(int8_t) X(uint8_t) X(bfloat16_t) X(half) \
    X(fp8_e4m3fn_t)
#define DI_LOADS(T) \
    void asc_loadalign(di_register_of<T>& dst, const __ubuf__ T* src, di_at at = di_here()); \
    void asc_loadalign_brc_elem(di_register_of<T>& dst, const __ubuf__ T* src, di_at at = di_here()); \
    void asc_loadalign_deintlv(di_register_of<T>& even, di_register_of<T>& odd, const __ubuf__ T* src, \
                               di_at at = di_here()); \
    void asc_storealign(__ubuf__ T* dst, const di_register_of<T>& src, vector_bool mask, di_at at = di_here()); \
    void asc_storealign_1st(__ubuf__ T* dst, const di_register_of<T>& src, di_at at = di_here()); \
    void asc_storealign_intlv(__ubuf__ T* dst, const di_register_of<T>& even, const di_register_of<T>& odd, \
                              di_at at = di_here()); \
    void asc_storealign_intlv(__ubuf__ T* dst, const di_register_of<T>& even, const di_register_of<T>& odd, \
                              vector_bool ignored, di_at at = di_here());
DI_LANES(DI_LOADS)
#undef DI_LOADS

#define DI_WIDEN(WIDE, NARROW) \
    void asc_loadalign_unpack(di_register_of<WIDE>& dst, const __ubuf__ NARROW* src, di_at at = di_here()); \
    void asc_storealign_pack(__ubuf__ NARROW* dst, const di_register_of<WIDE>& src, vector_bool mask, \
                             di_at at = di_here());
DI_WIDEN(uint32_t, uint16_t)
DI_WIDEN(int32_t, int16_t)
DI_WIDEN(uint16_t, uint8_t)
#undef DI_WIDEN
void asc_loadalign_unpack4(vector_uint32_t& dst, const __ubuf__ uint8_t* src, di_at at = di_here());
void asc_storealign_pack_quarter(__ubuf__ uint8_t* dst, const vector_uint32_t& src, vector_bool mask,
                                 di_at at = di_here());

// ---- arithmetic ---------------------------------------------------------------------------------------------------
#define DI_NUMBERS(X) X(float) X(int32_t) X(uint32_t) X(int16_t) X(uint16_t)
#define DI_INTEGERS(X) X(int32_t) X(uint32_t) X(int16_t) X(uint16_t) X(uint8_t)
#define DI_WORDS(X) X(float) X(int32_t) X(uint32_t)
#define DI_ONE(NAME, T) void NAME(di_register_of<T>& dst, const di_register_of<T>& a, vector_bool mask);
#define DI_TWO(NAME, T) \
    void NAME(di_register_of<T>& dst, const di_register_of<T>& a, const di_register_of<T>& b, vector_bool mask);
#define DI_SCALAR(NAME, T) void NAME(di_register_of<T>& dst, const di_register_of<T>& a, T b, vector_bool mask);
#define DI_COMPARE(NAME, T) \
    void NAME(vector_bool& dst, const di_register_of<T>& a, const di_register_of<T>& b, vector_bool mask, \
              di_at at = di_here()); \
    void NAME##_scalar(vector_bool& dst, const di_register_of<T>& a, T b, vector_bool mask, di_at at = di_here());

#define DI_ON_NUMBERS(T) \
    DI_TWO(asc_add, T) DI_TWO(asc_sub, T) DI_TWO(asc_mul, T) DI_TWO(asc_max, T) DI_TWO(asc_min, T) DI_TWO(asc_madd, T) \
    DI_SCALAR(asc_add_scalar, T) DI_SCALAR(asc_mul_scalar, T) DI_SCALAR(asc_max_scalar, T) \
    DI_SCALAR(asc_min_scalar, T) DI_COMPARE(asc_eq, T) DI_COMPARE(asc_ne, T) DI_COMPARE(asc_lt, T) \
    DI_COMPARE(asc_le, T) DI_COMPARE(asc_gt, T) DI_COMPARE(asc_ge, T)
DI_NUMBERS(DI_ON_NUMBERS)
DI_TWO(asc_div, float)
DI_ONE(asc_abs, float)
DI_ONE(asc_neg, float)
DI_ONE(asc_exp, float)
DI_ONE(asc_ln, float)
DI_ONE(asc_sqrt, float)
DI_ONE(asc_relu, float)
DI_ONE(asc_abs, int32_t)
DI_ONE(asc_neg, int32_t)
#define DI_ON_INTEGERS(T) \
    DI_TWO(asc_and, T) DI_TWO(asc_or, T) DI_TWO(asc_xor, T) DI_ONE(asc_not, T) \
    void asc_shiftleft_scalar(di_register_of<T>& dst, const di_register_of<T>& a, int16_t n, vector_bool mask); \
    void asc_shiftright_scalar(di_register_of<T>& dst, const di_register_of<T>& a, int16_t n, vector_bool mask);
DI_INTEGERS(DI_ON_INTEGERS)
void asc_shiftleft(vector_uint32_t& dst, const vector_uint32_t& a, const vector_int32_t& n, vector_bool mask);
void asc_shiftright(vector_uint32_t& dst, const vector_uint32_t& a, const vector_int32_t& n, vector_bool mask);
void asc_shiftleft(vector_int32_t& dst, const vector_int32_t& a, const vector_int32_t& n, vector_bool mask);
void asc_shiftright(vector_int32_t& dst, const vector_int32_t& a, const vector_int32_t& n, vector_bool mask);

#define DI_ON_LANES(T) \
    void asc_select(di_register_of<T>& dst, const di_register_of<T>& a, const di_register_of<T>& b, vector_bool mask); \
    void asc_duplicate_scalar(di_register_of<T>& dst, T value, vector_bool mask); \
    void asc_duplicate(di_register_of<T>& dst, const di_register_of<T>& src, vector_bool mask); \
    void asc_squeeze(di_register_of<T>& dst, const di_register_of<T>& src, vector_bool mask);
DI_LANES(DI_ON_LANES)
#define DI_ON_WORDS(T) \
    void asc_reduce_sum(di_register_of<T>& dst, const di_register_of<T>& a, vector_bool mask); \
    void asc_reduce_max(di_register_of<T>& dst, const di_register_of<T>& a, vector_bool mask); \
    void asc_reduce_min(di_register_of<T>& dst, const di_register_of<T>& a, vector_bool mask); \
    void asc_gather(di_register_of<T>& dst, const __ubuf__ T* base, const vector_uint32_t& index, vector_bool mask, \
                    di_at at = di_here()); \
    void asc_scatter(__ubuf__ T* base, const di_register_of<T>& src, const vector_uint32_t& index, vector_bool mask, \
                     di_at at = di_here());
DI_WORDS(DI_ON_WORDS)
void asc_arange(vector_int32_t& dst, int32_t start);
void asc_eq_scalar(vector_bool& dst, const vector_uint8_t& a, uint8_t b, vector_bool mask, di_at at = di_here());
// Add to 128 counts how often each byte value comes: of 0 .. 127, of 128 .. 255.
void asc_frequency_histogram_bin0(vector_uint16_t& dst, const vector_uint8_t& src, vector_bool mask,
                                  di_at at = di_here());
void asc_frequency_histogram_bin1(vector_uint16_t& dst, const vector_uint8_t& src, vector_bool mask,
                                  di_at at = di_here());

// ---- conversions: narrow results lie at the first part of their wide lane ------------------------------------------
void asc_float2int32_rn(vector_int32_t& dst, const vector_float& a, vector_bool mask);
void asc_float2int32_rz(vector_int32_t& dst, const vector_float& a, vector_bool mask);
void asc_int322float_rn(vector_float& dst, const vector_int32_t& a, vector_bool mask);
void asc_float2bfloat16_rn(vector_bfloat16_t& dst, const vector_float& a, vector_bool mask);
void asc_bfloat162float(vector_float& dst, const vector_bfloat16_t& a, vector_bool mask);
void asc_float2e4m3_rn_sat(vector_fp8_e4m3fn_t& dst, const vector_float& a, vector_bool mask);
void asc_e4m32float(vector_float& dst, const vector_fp8_e4m3fn_t& a, vector_bool mask);
#undef DI_ON_NUMBERS
#undef DI_ON_INTEGERS
#undef DI_ON_LANES
#undef DI_ON_WORDS
#undef DI_ONE
#undef DI_TWO
#undef DI_SCALAR
#undef DI_COMPARE
#endif
