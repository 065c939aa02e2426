// Storage formats in vector registers: E4M3, E8M0 and E2M1 codes, scales of groups. Codes and bytes lie in 32-bit lanes.
#ifndef DI_CODES_H
#define DI_CODES_H

enum DiFormat { DI_MXFP8, DI_MXFP4, DI_FP4_E4M3 };

DI_V vector_float di_e4m3(vector_uint32_t c, vector_bool m) {
    vector_float y;
    asc_e4m32float(y, di_as<vector_fp8_e4m3fn_t>(c), m);
    return y;
}
// Nearest, ties to even, clamped to +-448.
DI_V vector_uint32_t di_to_e4m3(vector_float x, vector_bool m) {
    vector_fp8_e4m3fn_t c;
    vector_uint32_t low, y;
    asc_float2e4m3_rn_sat(c, x, m);
    asc_duplicate_scalar(low, (uint32_t)0xffu, m);
    asc_and(y, di_as<vector_uint32_t>(c), low, m);
    return y;
}
// 2^(e - 127), e from 1 to 254.
DI_V vector_float di_e8m0(vector_uint32_t e, vector_bool m) {
    vector_uint32_t y;
    asc_shiftleft_scalar(y, e, 23, m);
    return di_as<vector_float>(y);
}
// 0, .5, 1, 1.5, 2, 3, 4, 6 and a sign bit.
DI_V vector_float di_e2m1(vector_uint32_t c, vector_bool m) {
    vector_uint32_t k, low, sign, bits;
    vector_float small, normal;
    vector_bool tiny;
    asc_duplicate_scalar(k, (uint32_t)7u, m);
    asc_and(low, c, k, m);
    asc_duplicate_scalar(k, (uint32_t)8u, m);
    asc_and(sign, c, k, m);
    asc_shiftleft_scalar(sign, sign, 28, m);
    asc_shiftleft_scalar(bits, low, 22, m);
    asc_add_scalar(bits, bits, (uint32_t)(126u << 23), m);
    normal = di_as<vector_float>(bits);
    asc_add_scalar(small, normal, -0.5f, m);  // .5 and .75 become 0 and .5
    asc_add(small, small, small, m);
    asc_lt_scalar(tiny, low, (uint32_t)2u, m);
    asc_select(normal, small, normal, tiny);
    asc_or(bits, di_as<vector_uint32_t>(normal), sign, m);
    return di_as<vector_float>(bits);
}
DI_V void di_count(vector_uint32_t& c, vector_float a, float bound, bool at, vector_bool m) {
    vector_bool over;
    vector_uint32_t more;
    if (at) asc_ge_scalar(over, a, bound, m);
    else asc_gt_scalar(over, a, bound, m);
    asc_add_scalar(more, c, (uint32_t)1u, m);
    asc_select(c, more, c, over);
}
// Nearest, ties to the even code, clamped to +-6; the sign of zero is kept.
DI_V vector_uint32_t di_to_e2m1(vector_float x, vector_bool m) {
    vector_float a;
    vector_uint32_t c, sign, k;
    asc_abs(a, x, m);
    asc_duplicate_scalar(c, (uint32_t)0u, m);
    di_count(c, a, 0.25f, false, m);
    di_count(c, a, 0.75f, true, m);
    di_count(c, a, 1.25f, false, m);
    di_count(c, a, 1.75f, true, m);
    di_count(c, a, 2.5f, false, m);
    di_count(c, a, 3.5f, true, m);
    di_count(c, a, 5.0f, false, m);
    asc_shiftright_scalar(sign, di_as<vector_uint32_t>(x), 28, m);
    asc_duplicate_scalar(k, (uint32_t)8u, m);
    asc_and(sign, sign, k, m);
    asc_or(c, c, sign, m);
    return c;
}
// Largest of each run of `group` lanes among the first `lanes`, in all lanes of the run.
DI_V vector_float di_group_max(vector_float a, uint32_t group, uint32_t lanes, vector_bool m) {
    vector_float out, top, all;
    vector_bool mine;
    asc_duplicate_scalar(out, 0.0f, m);
    for (uint16_t first = 0; first < 64 && first < lanes; first = first + group) {
        mine = di_lanes(first, group, m);
        asc_reduce_max(top, a, mine);
        asc_duplicate(all, top, m);
        asc_select(out, all, out, mine);
    }
    return out;
}
// The scale of groups whose largest magnitude is a: its byte and its value.
DI_V void di_scale(DiFormat f, vector_float a, vector_uint32_t& byte, vector_float& value, vector_bool m) {
    if (f == DI_FP4_E4M3) {
        vector_float six;
        asc_max_scalar(a, a, 0x6p-9f, m);
        asc_duplicate_scalar(six, 6.0f, m);
        asc_div(a, a, six, m);
        byte = di_to_e4m3(a, m);
        value = di_e4m3(byte, m);
        return;
    }
    vector_uint32_t bits, low, k;
    vector_bool above;
    asc_max_scalar(a, a, f == DI_MXFP8 ? 1e-4f : 0x6p-126f, m);
    asc_mul_scalar(a, a, f == DI_MXFP8 ? 1.0f / 448.0f : 1.0f / 6.0f, m);
    bits = di_as<vector_uint32_t>(a);
    asc_shiftright_scalar(byte, bits, 23, m);
    asc_duplicate_scalar(k, (uint32_t)0x7fffffu, m);
    asc_and(low, bits, k, m);
    asc_ne_scalar(above, low, (uint32_t)0u, m);
    asc_add_scalar(k, byte, (uint32_t)1u, m);
    asc_select(byte, k, byte, above);
    value = di_e8m0(byte, m);
}
DI_V vector_uint32_t di_code(DiFormat f, vector_float x, vector_bool m) {
    return f == DI_MXFP8 ? di_to_e4m3(x, m) : di_to_e2m1(x, m);
}
DI_V vector_float di_value(DiFormat f, vector_uint32_t c, vector_bool m) {
    return f == DI_MXFP8 ? di_e4m3(c, m) : di_e2m1(c, m);
}
DI_V vector_float di_scale_value(DiFormat f, vector_uint32_t byte, vector_bool m) {
    return f == DI_FP4_E4M3 ? di_e4m3(byte, m) : di_e8m0(byte, m);
}

// Pairs at p, p + 1, ..: whole vectors are interleaved, parts of one scattered.
DI_V void di_store_pairs(__ubuf__ float* p, vector_float even, vector_float odd, uint32_t pairs, vector_bool m) {
    if (pairs >= 64) {
        asc_storealign_intlv(p, even, odd);
        return;
    }
    di_store_steps(p, even, 0, 2, m);
    di_store_steps(p, odd, 1, 2, m);
}

#endif
