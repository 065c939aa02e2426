// What this machine can do at most: bytes read from memory and multiply-adds a second. Reports and benchmarks hold
// kernels against these two.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <numeric>
#include <system_error>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

const int64_t READ_BYTES = int64_t(1) << 30;  // far beyond any cache
const int REPEATS = 5;
const int SUMS = 12;  // independent ones hide the latency of a product
const int64_t TRIPS = 4000000;

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int64_t sum_of(const int64_t* data, int64_t count) {
    typedef int64_t Lanes __attribute__((vector_size(64), aligned(8)));
    Lanes sum[4] = {};
    for (int64_t i = 0; i + 32 <= count; i += 32) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) sum[j] += *(const Lanes*)(data + i + 8 * j);
    }
    const Lanes all = sum[0] + sum[1] + sum[2] + sum[3];
    return all[0] ^ all[7];
}

// Each loop keeps its sums in registers and returns its multiply-adds.
#if defined(__x86_64__)
__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"))) double dots_of_bf16(float* out) {
    __m512 sum[SUMS];
    for (int j = 0; j < SUMS; ++j) sum[j] = _mm512_setzero_ps();
    const __m512bh x = (__m512bh)_mm512_set1_epi16(0x3f80), y = x;
    for (int64_t i = 0; i < TRIPS; ++i) {
#pragma GCC unroll 12
        for (int j = 0; j < SUMS; ++j) sum[j] = _mm512_dpbf16_ps(sum[j], x, y);
    }
    for (int j = 0; j < SUMS; ++j) *out += sum[j][0] + sum[j][15];
    return double(SUMS) * 32 * TRIPS;
}

__attribute__((target("avx512f"))) double products_of_512(float* out) {
    __m512 sum[SUMS];
    for (int j = 0; j < SUMS; ++j) sum[j] = _mm512_setzero_ps();
    const __m512 x = _mm512_set1_ps(1), y = _mm512_set1_ps(1e-6f);
    for (int64_t i = 0; i < TRIPS; ++i) {
#pragma GCC unroll 12
        for (int j = 0; j < SUMS; ++j) sum[j] = _mm512_fmadd_ps(x, y, sum[j]);
    }
    for (int j = 0; j < SUMS; ++j) *out += sum[j][0] + sum[j][15];
    return double(SUMS) * 16 * TRIPS;
}

__attribute__((target("avx2,fma"))) double products_of_256(float* out) {
    __m256 sum[SUMS];
    for (int j = 0; j < SUMS; ++j) sum[j] = _mm256_setzero_ps();
    const __m256 x = _mm256_set1_ps(1), y = _mm256_set1_ps(1e-6f);
    for (int64_t i = 0; i < TRIPS; ++i) {
#pragma GCC unroll 12
        for (int j = 0; j < SUMS; ++j) sum[j] = _mm256_fmadd_ps(x, y, sum[j]);
    }
    for (int j = 0; j < SUMS; ++j) *out += sum[j][0] + sum[j][7];
    return double(SUMS) * 8 * TRIPS;
}
#endif

double products_of_128(float* out) {
    typedef float Four __attribute__((vector_size(16)));
    Four sum[SUMS] = {};
    const Four x = {1, 1, 1, 1}, y = {1e-6f, 1e-6f, 1e-6f, 1e-6f};
    for (int64_t i = 0; i < TRIPS; ++i) {
#pragma GCC unroll 12
        for (int j = 0; j < SUMS; ++j) sum[j] += x * y;
    }
    for (int j = 0; j < SUMS; ++j) *out += sum[j][0] + sum[j][3];
    return double(SUMS) * 4 * TRIPS;
}

double multiply(float* out) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bf16")) return dots_of_bf16(out);
    if (__builtin_cpu_supports("avx512f")) return products_of_512(out);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return products_of_256(out);
#endif
    return products_of_128(out);
}

// body(thread) on so many threads at a time.
template <class Body>
void on_each(int32_t threads, const Body& body) {
    std::vector<std::thread> others;
    for (int32_t i = 1; i < threads; ++i) others.emplace_back(body, i);
    body(0);
    for (std::thread& t : others) t.join();
}

void measure(int32_t threads, int64_t* data, int64_t count, double limits[2]) {
    std::vector<double> kept((size_t)threads);
    const int64_t part = count / threads;
    on_each(threads, [&](int32_t t) { std::iota(data + part * t, data + part * (t + 1), 0); });
    for (int r = 0; r < REPEATS; ++r) {
        const auto start = std::chrono::steady_clock::now();
        on_each(threads, [&](int32_t t) { kept[(size_t)t] += (double)sum_of(data + part * t, part); });
        limits[0] = std::max(limits[0], (double)READ_BYTES / seconds_since(start));
    }
    std::vector<double> done((size_t)threads);
    for (int r = 0; r < REPEATS; ++r) {
        const auto start = std::chrono::steady_clock::now();
        on_each(threads, [&](int32_t t) {
            float sink = 0;
            done[(size_t)t] = multiply(&sink);
            kept[(size_t)t] += (double)sink;
        });
        limits[1] = std::max(limits[1], std::accumulate(done.begin(), done.end(), 0.0) / seconds_since(start));
    }
    volatile double used = std::accumulate(kept.begin(), kept.end(), 0.0);  // results, or a compiler would drop the loops
    (void)used;
}

}  // namespace

// limits[0]: bytes a second that `threads` threads read of 1 GiB, limits[1]: multiply-adds a second of the widest
// products that the processor has, both the best of several. Returns 0, or 3 (DI_NO_MEMORY).
extern "C" __attribute__((visibility("default"))) int di_machine_limits(int32_t threads, double limits[2]) {
    const int64_t count = READ_BYTES / 8;
    std::unique_ptr<int64_t[]> data(new (std::nothrow) int64_t[(size_t)count]);
    if (!data) return 3;
    limits[0] = limits[1] = 0;
    try {
        measure(threads, data.get(), count, limits);
    } catch (const std::system_error&) {  // no more threads
        return 3;
    }
    return 0;
}
