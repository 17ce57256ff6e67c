// The products around an MLP's GELU in training, for Hopper: one tile's last step runs during the next tile's product,
// which cuBLASLt does not do where it has to store or read a second matrix. gelu_products.py calls it;
// hopper.cuh has what it uses.
//
//     FORWARD     g = GELU(h), h = x W + bias; instead of h, GELU'(h) is kept, in 8 bits
//     otherwise   dh = (x W) GELU'(h), and the sums of its rows; W is the weight of the layer after the GELU
//
// Two multiprocessors share a tile of 256 x 128: each computes 128 rows, and each loads one half of W's part and sends
// it to both. In each, one thread loads, STAGES parts ahead, and two groups of four warps take tiles in turns: while
// one computes its product, the other finishes the tile before. Tiles of equal rows follow each other, so that x is
// read once and W stays in the cache.
//
// GELU' lies between -.129 and 1.129. It is kept in steps of 1/200, in which 0 and 1 are exact: within .0025, where
// bf16 would be within .002. Its order in memory is that of the threads that compute it, the same in both directions.
//
// Legend: x [M, K], W [K, N] (its columns contiguous if COLUMNS, otherwise its rows), g, dh [M, N], all bf16.

constexpr int ROWS = 128, COLS = 128, DEPTH = 64, STAGES = 6;
constexpr int X_BYTES = ROWS * DEPTH * 2, W_BYTES = COLS * DEPTH * 2, STAGE = X_BYTES + W_BYTES;
constexpr int BOX = ROWS * 64 * 2;                   // half a tile of a result
constexpr int BUFFERS = STAGES * STAGE;              // one box for each group
constexpr int BARRIERS = BUFFERS + 2 * BOX;          // full[STAGES], empty[STAGES], turn[2]
constexpr float STEPS = 200.0f, ZERO = 8388608.0f + 26.0f;  // GELU' d is the last byte of the float STEPS d + ZERO
#ifdef COLUMNS
constexpr int W_BOXES = 16, W_PART = 2;              // the next 16 numbers of W's columns
#else
constexpr int W_BOXES = W_BYTES / 2, W_PART = 128;   // the next 16 rows of W
#endif

__device__ __forceinline__ u32 rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Wait for both multiprocessors; a warp arrives once, after all of its threads.
__device__ __forceinline__ void cluster_sync() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Wait until this warp's rows of a box can be written.
__device__ __forceinline__ void begin(int thread) {
    if (thread % 32 == 0) store_wait_read();
    __syncwarp();
}

// Store this warp's rows of a box: 16 of each half.
__device__ __forceinline__ void end(const Map* out, int column, int row, u32 box, int thread) {
    fence_async();
    __syncwarp();
    if (thread % 32 == 0) {
        const int own = thread / 32 * 16;
        store(out, column, row + own, box + own * 128);
        store(out, column, row + 64 + own, box + (64 + own) * 128);
        store_commit();
    }
}

#ifdef FORWARD
// x -> GELU(x), and GELU'(x) in the last byte. GELU is x p as triton_training.phi computes it; GELU' is within .0008.
__device__ __forceinline__ u32 gelu(float& x) {
    float square = x * x, u, slope, t;
#ifdef TANH
    u = 0.7978845608f + 0.0356774081f * square;
    slope = 1.5957691216f + 0.2140644486f * square;
#else
    square = fminf(square, 50.0f);
    u = 0.797480661f + (0.0369836548f - 0.000346257563f * square) * square;
    slope = 1.606677f + 0.205507f * square;
#endif
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(x * u));
    const float p = 0.5f * t + 0.5f;
    x *= p;
    return __float_as_uint((p + slope * (x - x * p)) * STEPS + ZERO);
}

// g and GELU' of a tile, one half of its columns after the other.
__device__ __forceinline__ void finish(float (&d)[2][64], u32 box, const Map* g, const u32 (&bias)[16], uint4* slopes,
                                       int row, int column, int thread) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        begin(thread);
#pragma unroll
        for (int block = 0; block < 4; block++) {
            u32 bytes[4];
#pragma unroll
            for (int b = 0; b < 2; b++) {
                float* v = &d[b][32 * half + 8 * block];
                u32 pairs[4], q[8];
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const u32 pair = bias[2 * (4 * half + block) + i / 4];
                    v[i] += __uint_as_float(i % 2 ? pair & 0xFFFF0000u : pair << 16);
                    q[i] = gelu(v[i]);
                }
                rounded(pairs, v);
                to_shared(box, 64 * b + thread / 32 * 16, 16 * block, thread, pairs);
#pragma unroll
                for (int i = 0; i < 2; i++)
                    bytes[2 * b + i] = __byte_perm(__byte_perm(q[4 * i], q[4 * i + 1], 0x0040),
                                                   __byte_perm(q[4 * i + 2], q[4 * i + 3], 0x0040), 0x5410);
            }
            slopes[128 * (4 * half + block)] = make_uint4(bytes[0], bytes[1], bytes[2], bytes[3]);
        }
        end(g, column + 64 * half, row, box, thread);
    }
}
#else
// dh of a tile, and its sums over the 32 rows of each warp.
__device__ __forceinline__ void finish(float (&d)[2][64], u32 box, const Map* dh, const uint4 (&slopes)[8], float* sums,
                                       int row, int column, int thread, int N) {
    const int lane = thread & 31;
    float sum[32];
#pragma unroll
    for (int i = 0; i < 32; i++) sum[i] = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        begin(thread);
#pragma unroll
        for (int block = 0; block < 4; block++) {
            const uint4& four = slopes[4 * half + block];
            const u32 bytes[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int b = 0; b < 2; b++) {
                float* v = &d[b][32 * half + 8 * block];
                u32 pairs[4];
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    float q = __uint_as_float(__byte_perm(bytes[2 * b + i / 4], 0x4B000000u, 0x7650 + i % 4)) - ZERO;
                    v[i] *= q * (1.0f / STEPS);
                    sum[16 * half + 4 * block + 2 * (i / 4) + i % 2] += v[i];
                }
                rounded(pairs, v);
                to_shared(box, 64 * b + thread / 32 * 16, 16 * block, thread, pairs);
            }
        }
        end(dh, column + 64 * half, row, box, thread);
    }
    sum_rows(sum, lane);
    // What is left: half `lane & 16`, blocks 2 and 3 if `lane & 8`, the odd one of them if `lane & 4`.
    int at = column + 64 * (lane >> 4) + 32 * (lane >> 3 & 1) + 16 * (lane >> 2 & 1) + 2 * (lane & 3);
    float* out = sums + (row / 32 + (thread >> 5)) * (long long)N + at;
    *(float2*)out = make_float2(sum[0], sum[1]);
    *(float2*)(out + 8) = make_float2(sum[2], sum[3]);
}
#endif

// A stage, and which phase of its barrier is next.
struct Ring {
    u32 stage, parity;
    __device__ __forceinline__ void step() { if (++stage == STAGES) { stage = 0; parity ^= 1; } }
    __device__ __forceinline__ void skip(u32 count) {
        stage += count;
        parity ^= stage / STAGES & 1;
        stage %= STAGES;
    }
};

// Boxes of 64 columns, and rows: x 128, w 64, out 16. `other` is the bias in bf16, or the sums [8 pairs, N];
// `slopes` is GELU', 1024 uint4 per tile. `pairs` of row tiles, `tiles` of columns, `turns` = K / 64.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
gelu_products(const __grid_constant__ Map x, const __grid_constant__ Map w, const __grid_constant__ Map out,
              void* other, uint4* slopes, int pairs, int tiles, int turns) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 base = shared_address(memory);
    const u32 full = base + BARRIERS, empty = full + 8 * STAGES, turn = empty + 8 * STAGES;
    const u32 rank = rank_in_cluster();
    const int cluster = blockIdx.x / 2, clusters = gridDim.x / 2, thread = threadIdx.x % 128, total = pairs * tiles;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 8);          // four warps of each multiprocessor
        }
        for (int group = 0; group < 2; group++) barrier_init(turn + 8 * group, 4);
        barriers_are_ready();
    }
    __syncthreads();
    cluster_sync();

    if (threadIdx.x < 128) {                         // loads
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            Ring ring = {0, 1};                      // at first, all stages are empty
            for (int tile = cluster; tile < total; tile += clusters) {
                int row = (tile / tiles * 2 + rank) * ROWS, column = tile % tiles * COLS + rank * 64;
                for (int k = 0; k < turns; k++, ring.step()) {
                    u32 to = base + ring.stage * STAGE, barrier = full + 8 * ring.stage;
                    barrier_wait(empty + 8 * ring.stage, ring.parity);
                    barrier_expect(barrier, STAGE);
                    load(to, &x, k * DEPTH, row, barrier);
#ifdef COLUMNS
                    load_for_both(to + X_BYTES + rank * W_BYTES / 2, &w, k * DEPTH, column, barrier);
#else
                    load_for_both(to + X_BYTES + rank * W_BYTES / 2, &w, column, k * DEPTH, barrier);
#endif
                }
            }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int group = threadIdx.x / 128 - 1, lane = thread & 31;
        const u32 box = base + BUFFERS + group * BOX;
        float d[2][64];
        Ring ring = {0, 0};
        if (group == 1) ring.skip(turns);            // the first tile is the other group's
        u32 n = 0;                                   // tiles of this group that are done
        for (int tile = cluster + group * clusters; tile < total; tile += 2 * clusters, n++) {
            const int row = (tile / tiles * 2 + rank) * ROWS, column = tile % tiles * COLS;
            uint4* own = slopes + (row / ROWS * tiles + tile % tiles) * 1024LL + thread;
            // What the last step reads is loaded before the product.
#ifdef FORWARD
            u32 bias[16];
#pragma unroll
            for (int i = 0; i < 16; i++) bias[i] = __ldg((const u32*)other + column / 2 + 4 * i + (thread & 3));
#else
            uint4 known[8];
#pragma unroll
            for (int i = 0; i < 8; i++) known[i] = __ldg(own + 128 * i);
#endif
            // The products of one group follow those of the other. Every warp arrives at every barrier, so that no
            // barrier is two phases ahead of a warp that still waits for it.
            if (group + n > 0) barrier_wait(turn + 8 * group, (n - (group == 0)) & 1);
            u32 before = 0;                          // the barrier of the stage before
            for (int k = 0; k < turns; k++, ring.step()) {
                const u32 at = base + ring.stage * STAGE;
                barrier_wait(full + 8 * ring.stage, ring.parity);
                const u64 left = described(at), right = described(at + X_BYTES, W_BOXES);
                mma_fence();
#pragma unroll
                for (int part = 0; part < 4; part++) {
                    mma(d[0], left + 2 * part, right + W_PART * part, k | part);
                    mma(d[1], left + X_BYTES / 32 + 2 * part, right + W_PART * part, k | part);
                }
                mma_commit();
                if (k > 0) {
                    mma_wait<1>();
                    if (lane < 2) barrier_arrive(before, lane);
                }
                before = empty + 8 * ring.stage;
            }
            if (lane == 0) barrier_arrive(turn + 8 * (1 - group));
            mma_wait<0>();
            if (lane < 2) barrier_arrive(before, lane);
#ifdef FORWARD
            finish(d, box, &out, bias, own, row, column, thread);
#else
            finish(d, box, &out, known, (float*)other, row, column, thread, tiles * COLS);
#endif
            ring.skip(turns);                        // the next tile is the other group's
        }
        if (lane == 0) store_wait();
    }
    // Nobody leaves while the other may still send to it.
    cluster_sync();
}
