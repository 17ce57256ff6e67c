// The backward pass of attention for heads of 64 and up to 208 tokens, for Hopper. attention_gradient.py calls it;
// hopper.cuh has what it uses.
//
//     A = exp(q k^T scale - lse)     dv = A^T do     dA = do v^T     delta_i = sum_e do_ie o_ie
//     dS = A (dA - delta)            dk = dS^T q scale               dq = dS k scale
//
// A block computes one head of one image after the other, with everything of a head in shared memory. Keys are rows of
// A^T and dS^T, so that both go from one product to the next in registers; only dq needs dS from shared memory. Two
// groups of four warps take 64 keys each, in turns, then 64 queries each. One thread loads the next head as soon as
// there is room. Three warps compute delta of the next head, and the gradient of v's bias, which is the sum of do,
// because the rows of A sum to 1.
//
// Tokens beyond T are read as zeros, and their lse is infinite: their A is 0. Keys beyond T have a dS, which meets
// rows of zeros in k. Nothing beyond T is stored.
//
// Legend: T tokens, TP the same rounded up to 16; PARTS are PART(N, FIRST) for so many queries at a time as there are
// registers for. qkv and dqkv [images, T, 3 width], o and dO [images, T, width], all bf16.

constexpr int TILE = TP * 128;                       // bytes of 64 numbers of each token
constexpr int BLOCKS = 4;                            // of 64 keys or queries, the last of which may be empty
constexpr int Q = 0, K = TILE, V = 2 * TILE, DO = 3 * TILE, DS = 4 * TILE;      // dS^T: BLOCKS boxes of 64 queries
constexpr int TOKENS = DS + BLOCKS * TILE;           // lse / log 2 and delta of each query, for two heads
constexpr int BARRIERS = TOKENS + 2 * TP * 8;
constexpr int AT_ONCE = 3;                           // tokens whose delta a thread helps to compute
constexpr float LOG2E = 1.4426950408889634f;

__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// lse and delta of two queries that follow each other.
__device__ __forceinline__ float4 two_tokens(u32 at) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at));
    return v;
}

// Round 16 rows of 64 columns, scaled, and store them by way of the same rows of a matrix in shared memory.
__device__ __forceinline__ void put(const float (&v)[32], float scale, u32 matrix, const Map* out, int column, int row,
                                    int image, int thread) {
#pragma unroll
    for (int block = 0; block < 4; block++) {
        float part[8];
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 8; i++) part[i] = v[8 * block + i] * scale;
        rounded(pairs, part);
        to_shared(matrix, row, 16 * block, thread, pairs);
    }
    fence_async();
    __syncwarp();
    if (thread % 32 == 0) {
        store(out, column, row, image, matrix + row * 128);
        store_commit();
    }
    __syncwarp();
}

// The part of N queries, from FIRST on, for 64 keys from `key` on: adds to dv and dk, and writes dS.
template <int N, int FIRST>
__device__ __forceinline__ void queries(float (&dv)[32], float (&dk)[32], u32 base, u32 tokens, int key, float factor,
                                        int thread) {
    float s[N / 2], da[N / 2];
    u32 pairs[N / 16][4], changed[N / 16][4];
    const u64 q = described(base + Q + FIRST * 128), g = described(base + DO + FIRST * 128);
    const u64 k = described(base + K + key * 128), v = described(base + V + key * 128);
    const u32 at = tokens + (FIRST + 2 * (thread & 3)) * 8;
    mma_fence();
#pragma unroll
    for (int part = 0; part < 4; part++) mma(s, k + 2 * part, q + 2 * part, part);
    mma_commit();
#pragma unroll
    for (int part = 0; part < 4; part++) mma(da, v + 2 * part, g + 2 * part, part);
    mma_commit();
    mma_wait<1>();
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
        const float4 two = two_tokens(at + 64 * i);
#pragma unroll
        for (int j = 0; j < 4; j++) s[4 * i + j] = power_of_two(s[4 * i + j] * factor - (j % 2 ? two.z : two.x));
    }
#pragma unroll
    for (int i = 0; i < N / 16; i++) rounded(pairs[i], &s[8 * i]);
    mma_fence();
#pragma unroll
    for (int i = 0; i < N / 16; i++) mma_held(dv, pairs[i], g + 128 * i, FIRST | i);
    mma_commit();
    mma_wait<1>();
#pragma unroll
    for (int i = 0; i < N / 8; i++) {                // A as it was rounded: registers are scarce
        const float4 two = two_tokens(at + 64 * i);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const u32 pair = pairs[i / 2][i % 2 * 2 + j];
            const float *d = &da[4 * i + 2 * j];
            changed[i / 2][i % 2 * 2 + j] = packed(low(pair) * (d[0] - two.y), high(pair) * (d[1] - two.w));
        }
    }
    mma_fence();
#pragma unroll
    for (int i = 0; i < N / 16; i++) mma_held(dk, changed[i], q + 128 * i, FIRST | i);
    mma_commit();
    const int row = key + thread / 32 * 16;
    if (row < TP) {
#pragma unroll
        for (int i = 0; i < N / 16; i++) {
            const int query = FIRST + 16 * i;
            to_shared(base + DS + query / 64 * TILE, row, query % 64, thread, changed[i]);
        }
    }
}

// Boxes of qkv and dO have TP rows, those of dqkv 16. `of_q` [8 images, width] and `of_v` [3 images, width] are parts
// of the biases' gradients. `factor` = scale / log 2.
extern "C" __global__ void __launch_bounds__(384, 1)
attention_gradient(const __grid_constant__ Map qkv, const __grid_constant__ Map dout, const __grid_constant__ Map dqkv,
                   const uint4* o, const uint4* dout_again, const float* lse, float* of_q, float* of_v, int heads,
                   int items, float scale, float factor) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 base = shared_address(memory);
    const u32 full = base + BARRIERS, free_do = full + 8, free_v = full + 16, free_k = full + 24, free_q = full + 32;
    const u32 ready = full + 40, used = full + 56;   // lse and delta of two heads
    const int thread = threadIdx.x % 128, lane = thread & 31, width = heads * 64;

    if (threadIdx.x == 0) {
        barrier_init(full, 1);
        for (int i = 0; i < 4; i++) barrier_init(free_do + 8 * i, 8);           // one per warp that computes
        for (int i = 0; i < 2; i++) {
            barrier_init(ready + 8 * i, 3);
            barrier_init(used + 8 * i, 8);
        }
        barriers_are_ready();
    }
    __syncthreads();

    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
        if (threadIdx.x == 0) {                      // loads
            u32 parity = 1;                          // at first, everything is free
            for (int item = blockIdx.x; item < items; item += gridDim.x, parity ^= 1) {
                const int image = item / heads, column = item % heads * 64;
                barrier_wait(free_do, parity);
                barrier_expect(full, 4 * TILE);
                load(base + DO, &dout, column, 0, image, full);
                barrier_wait(free_v, parity);
                load(base + V, &qkv, 2 * width + column, 0, image, full);
                barrier_wait(free_k, parity);
                load(base + K, &qkv, width + column, 0, image, full);
                barrier_wait(free_q, parity);
                load(base + Q, &qkv, column, 0, image, full);
            }
        }
        // delta and the sums of do: eight threads per token
        const int warp = thread / 32 - 1;
        for (int item = blockIdx.x, n = 0; warp >= 0 && item < items; item += gridDim.x, n++) {
            const int image = item / heads, head = item % heads, slot = n & 1;
            float sum[8];
#pragma unroll
            for (int i = 0; i < 8; i++) sum[i] = 0.0f;
            barrier_wait(used + 8 * slot, (n >> 1 & 1) ^ 1);
            for (int first = 4 * warp; first < TP; first += 12 * AT_ONCE) {
                uint4 a[AT_ONCE], b[AT_ONCE];        // loaded together, because each load takes long
                float total[AT_ONCE];
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) {
                    const int token = min(first + 12 * i + lane / 8, T - 1);
                    const long long at = ((image * (long long)T + token) * width + head * 64) / 8 + lane % 8;
                    a[i] = __ldg(o + at);
                    b[i] = __ldg(dout_again + at);
                    total[i] = __ldg(lse + (long long)item * T + token);
                }
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) {
                    const int token = first + 12 * i + lane / 8;
                    const bool inside = token < T;
                    const u32 left[4] = {a[i].x, a[i].y, a[i].z, a[i].w}, right[4] = {b[i].x, b[i].y, b[i].z, b[i].w};
                    float delta = 0.0f;
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        delta += low(left[j]) * low(right[j]) + high(left[j]) * high(right[j]);
                        sum[2 * j] += inside ? low(right[j]) : 0.0f;
                        sum[2 * j + 1] += inside ? high(right[j]) : 0.0f;
                    }
#pragma unroll
                    for (int bit = 1; bit < 8; bit *= 2) delta += __shfl_xor_sync(0xFFFFFFFFu, delta, bit);
                    if (lane % 8 == 0 && token < TP)
                        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"(base + TOKENS + (slot * TP + token) * 8),
                                     "f"(inside ? total[i] * LOG2E : __int_as_float(0x7F800000)),
                                     "f"(inside ? delta : 0.0f) : "memory");
                }
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(ready + 8 * slot);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                sum[i] += __shfl_xor_sync(0xFFFFFFFFu, sum[i], 8);
                sum[i] += __shfl_xor_sync(0xFFFFFFFFu, sum[i], 16);
            }
            if (lane < 8) {
                float4* out = (float4*)(of_v + (image * 3LL + warp) * width + head * 64) + 2 * lane;
                out[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
                out[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
        const int group = threadIdx.x / 128 - 1, own = thread / 32 * 16;        // the warp's rows of a block
        for (int item = blockIdx.x, n = 0; item < items; item += gridDim.x, n++) {
            const int image = item / heads, column = item % heads * 64, slot = n & 1;
            barrier_wait(ready + 8 * slot, n >> 1 & 1);
            barrier_wait(full, n & 1);
            for (int turn = 0; turn < 2; turn++) {
                const int key = 64 * (group + 2 * turn), row = key + own;
                float dv[32], dk[32];
#define PART(N, FIRST) queries<N, FIRST>(dv, dk, base, base + TOKENS + slot * TP * 8, key, factor, thread);
                PARTS
                mma_wait<0>();
                if (row < TP) {                      // these rows of v are read no more
                    put(dv, 1.0f, base + V, &dqkv, 2 * width + column, row, image, thread);
                    if (lane == 0) store_wait_read();
                    __syncwarp();
                    put(dk, scale, base + V, &dqkv, width + column, row, image, thread);
                }
            }
            fence_async();                           // of dS
            if (lane == 0) {
                barrier_arrive(free_do);
                barrier_arrive(used + 8 * slot);
                store_wait_read();
                barrier_arrive(free_v);
            }
            __syncwarp();
            asm volatile("bar.sync 1, 256;" ::: "memory");
            float dq[2][32], sum[16];
            mma_fence();
#pragma unroll
            for (int turn = 0; turn < 2; turn++) {
                const u64 left = described(base + DS + (group + 2 * turn) * TILE), right = described(base + K);
#pragma unroll
                for (int i = 0; i < TP / 16; i++) mma_turned(dq[turn], left + 128 * i, right + 128 * i, i);
            }
            mma_commit();
            mma_wait<0>();
            if (lane == 0) barrier_arrive(free_k);
#pragma unroll
            for (int i = 0; i < 16; i++) sum[i] = 0.0f;
#pragma unroll
            for (int turn = 0; turn < 2; turn++) {
                const int row = 64 * (group + 2 * turn) + own;
                if (row < TP) {
                    put(dq[turn], scale, base + Q, &dqkv, column, row, image, thread);
#pragma unroll
                    for (int i = 0; i < 32; i++) sum[2 * (i / 4) + i % 2] += dq[turn][i] * scale;
                }
            }
            if (lane == 0) {
                store_wait_read();
                barrier_arrive(free_q);
            }
            __syncwarp();
            sum_rows(sum, lane);
            const int at = column + 32 * (lane >> 4) + 16 * (lane >> 3 & 1) + 8 * (lane >> 2 & 1) + 2 * (lane & 3);
            *(float2*)(of_q + (image * 8LL + 4 * group + thread / 32) * width + at) = make_float2(sum[0], sum[1]);
        }
        if (lane == 0) store_wait();
    }
}
