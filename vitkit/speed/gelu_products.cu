// The products around an MLP's GELU in training, for Hopper: one tile's last step runs during the next tile's product,
// which cuBLASLt does not do where it has to store or read a second matrix. gelu_products.py compiles and calls it.
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
// Matrices in shared memory have rows of 64 numbers, 128 bytes, in which 16-byte pieces are permuted ("swizzled") so
// that eight rows can be read at once.

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) Map { u64 words[16]; };  // CUtensorMap

constexpr int ROWS = 128, COLS = 128, DEPTH = 64, STAGES = 6;
constexpr int X_BYTES = ROWS * DEPTH * 2, W_BYTES = COLS * DEPTH * 2, STAGE = X_BYTES + W_BYTES;
constexpr int BOX = ROWS * 64 * 2;                   // half a tile of a result
constexpr int BUFFERS = STAGES * STAGE;              // one box for each group
constexpr int BARRIERS = BUFFERS + 2 * BOX;          // full[STAGES], empty[STAGES], turn[2]
constexpr float STEPS = 200.0f, ZERO = 8388608.0f + 26.0f;  // GELU' d is kept in the last byte of the float STEPS d + ZERO

__device__ __forceinline__ u32 rank_in_cluster() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }

__device__ __forceinline__ void barrier_init(u32 at, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at), "r"(bytes) : "memory");
}

// Arrive at the barrier that is at the same place in a multiprocessor of the cluster.
__device__ __forceinline__ void barrier_arrive(u32 at, u32 rank) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there]; }" :: "r"(at), "r"(rank) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 at, u32 parity) {
    asm volatile("{ .reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again; }" :: "r"(at), "r"(parity) : "memory");
}

__device__ __forceinline__ void load(u32 to, const Map* map, int column, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 :: "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

__device__ __forceinline__ void load_for_both(u32 to, const Map* map, int column, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;"
                 :: "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "h"((unsigned short)3) : "memory");
}

__device__ __forceinline__ void store(const Map* map, int column, int row, u32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
                 :: "l"(map), "r"(column), "r"(row), "r"(from) : "memory");
}

__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void group_sync(int group) { asm volatile("bar.sync %0, 128;" :: "r"(1 + group) : "memory"); }

__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void mma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory");
}

// Describe a matrix in shared memory: bytes from one group of eight rows to the next, and from one box to the next.
__device__ __forceinline__ u64 described(u32 at, u32 rows, u32 boxes) {
    return u64((at & 0x3FFFF) >> 4) | u64(boxes >> 4) << 16 | u64(rows >> 4) << 32 | u64(1) << 62;
}

#define OUT4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OUT16(i) OUT4(i), OUT4(i + 4), OUT4(i + 8), OUT4(i + 12)
#ifdef COLUMNS
#define TURN_W "0"
constexpr int RIGHT_BOXES = 16, RIGHT_PART = 2;      // 16 numbers of W's columns, side by side
#else
#define TURN_W "1"
constexpr int RIGHT_BOXES = W_BYTES / 2, RIGHT_PART = 128;  // 16 rows of W
#endif

// d += x W for 64 rows, 128 columns, 16 numbers deep; d = x W if `adds` is 0.
__device__ __forceinline__ void mma(float (&d)[64], u64 x, u64 w, int adds) {
    asm volatile(
        "{ .reg .pred adds; setp.ne.b32 adds, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, adds, 1, 1, 0, " TURN_W "; }"
        : OUT16(0), OUT16(16), OUT16(32), OUT16(48) : "l"(x), "l"(w), "r"(adds));
}

__device__ __forceinline__ u32 packed(float a, float b) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
}

__device__ __forceinline__ void to_shared(u32 at, const u32 (&v)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(at), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}

#ifdef FORWARD
// GELU(x) = x p and GELU'(x) = p + x slope, as triton_training.phi computes them.
__device__ __forceinline__ void phi(float x, float& p, float& slope) {
    float square = x * x, u, t;
#ifdef TANH
    u = 0.7978845608f + 0.0356774081f * square;
    slope = 1.5957691216f + 0.2140644486f * square;
#else
    square = fminf(square, 50.0f);
    u = 0.797480661f + (0.0369836548f - 0.000346257563f * square) * square;
    slope = 1.594961322f + (0.2219019288f - 0.00346257563f * square) * square;
#endif
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(x * u));
    p = 0.5f * t + 0.5f;
    slope *= p - p * p;
}
#endif

// Where the numbers of this thread go in a box, by `block` of 16 columns and half `b` of the rows.
__device__ __forceinline__ u32 place(int thread, int b, int block) {
    int lane = thread & 31, row = 64 * b + 16 * (thread >> 5) + (lane & 15), piece = 2 * block + (lane >> 4);
    return row * 128 + ((piece ^ (row & 7)) << 4);
}

// Wait until the box can be written.
__device__ __forceinline__ void begin(int thread, int group) {
    if (thread == 0) store_wait_read();
    group_sync(group);
}

// Store the box.
__device__ __forceinline__ void end(const Map* out, int column, int row, u32 buffer, int thread, int group) {
    fence_async();
    group_sync(group);
    if (thread == 0) {
        store(out, column, row, buffer);
        store_commit();
    }
}

#ifdef FORWARD
// GELU' in 8 bits, in the last byte.
__device__ __forceinline__ u32 byte_of(float d) { return __float_as_uint(fmaf(d, STEPS, ZERO)); }

// g and GELU' of a tile, one half of its columns after the other.
__device__ __forceinline__ void finish(float (&d)[2][64], u32 buffer, const Map* g, const u32 (&bias)[16], uint4* slopes,
                                       int row, int column, int thread, int group) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        begin(thread, group);
#pragma unroll
        for (int block = 0; block < 4; block++) {
            const u32* two = &bias[2 * (4 * half + block)];
            u32 bytes[4];
#pragma unroll
            for (int b = 0; b < 2; b++) {
                float v[8];
                u32 pairs[4], q[8];
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    u32 pair = two[i / 4];
                    v[i] = d[b][32 * half + 8 * block + i] + __uint_as_float(i & 1 ? pair & 0xFFFF0000u : pair << 16);
                    float p, slope;
                    phi(v[i], p, slope);
                    q[i] = byte_of(fmaf(v[i], slope, p));
                    v[i] *= p;
                }
#pragma unroll
                for (int i = 0; i < 4; i++) pairs[i] = packed(v[2 * i], v[2 * i + 1]);
                to_shared(buffer + place(thread, b, block), pairs);
#pragma unroll
                for (int i = 0; i < 2; i++)
                    bytes[2 * b + i] = __byte_perm(__byte_perm(q[4 * i], q[4 * i + 1], 0x0040),
                                                   __byte_perm(q[4 * i + 2], q[4 * i + 3], 0x0040), 0x5410);
            }
            slopes[128 * (4 * half + block)] = make_uint4(bytes[0], bytes[1], bytes[2], bytes[3]);
        }
        end(g, column + 64 * half, row, buffer, thread, group);
    }
}
#else
template <int STEP> __device__ __forceinline__ void hand_over(float (&sum)[32], int lane) {
    const bool upper = lane & STEP;
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        float mine = upper ? sum[i + STEP] : sum[i], theirs = upper ? sum[i] : sum[i + STEP];
        sum[i] = mine + __shfl_xor_sync(0xFFFFFFFFu, theirs, STEP);
    }
}

// dh of a tile, and its sums over the 32 rows of each warp.
__device__ __forceinline__ void finish(float (&d)[2][64], u32 buffer, const Map* dh, const uint4 (&slopes)[8], float* sums,
                                       int row, int column, int thread, int group, int N) {
    const int lane = thread & 31;
    float sum[32];
#pragma unroll
    for (int i = 0; i < 32; i++) sum[i] = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        begin(thread, group);
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
#pragma unroll
                for (int i = 0; i < 4; i++) pairs[i] = packed(v[2 * i], v[2 * i + 1]);
                to_shared(buffer + place(thread, b, block), pairs);
            }
        }
        end(dh, column + 64 * half, row, buffer, thread, group);
    }
    // Sum over the eight threads with equal columns: each step hands over one half of the columns.
    hand_over<16>(sum, lane);
    hand_over<8>(sum, lane);
    hand_over<4>(sum, lane);
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

// x and out: boxes of 64 columns and 128 rows; w: 64 and 64. `other` is the bias in bf16, or the sums [8 pairs, N];
// `slopes` is GELU', 1024 uint4 per tile. `pairs` of row tiles, `tiles` of columns, `turns` = K / 64.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
product_gelu(const __grid_constant__ Map x, const __grid_constant__ Map w, const __grid_constant__ Map out, void* other,
             uint4* slopes, int pairs, int tiles, int turns) {
    extern __shared__ __align__(1024) unsigned char memory[];
    u32 base;
    asm("{ .reg .u64 p; cvta.to.shared.u64 p, %1; cvt.u32.u64 %0, p; }" : "=r"(base) : "l"(memory));
    const u32 full = base + BARRIERS, empty = full + 8 * STAGES, turn = empty + 8 * STAGES;
    const u32 rank = rank_in_cluster();
    const int cluster = blockIdx.x / 2, clusters = gridDim.x / 2, thread = threadIdx.x % 128, total = pairs * tiles;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 2);          // one group of each multiprocessor
        }
        for (int group = 0; group < 2; group++) barrier_init(turn + 8 * group, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");

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
        const int group = threadIdx.x / 128 - 1;
        const u32 buffer = base + BUFFERS + group * BOX;
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
            // The products of one group follow those of the other. That also keeps each barrier within one phase.
            if (group + n > 0) barrier_wait(turn + 8 * group, (n - (group == 0)) & 1);
            u32 before = 0;                          // the barrier of the stage before
            for (int k = 0; k < turns; k++, ring.step()) {
                const u32 at = base + ring.stage * STAGE;
                barrier_wait(full + 8 * ring.stage, ring.parity);
                const u64 left = described(at, 1024, 16), right = described(at + X_BYTES, 1024, RIGHT_BOXES);
                mma_fence();
#pragma unroll
                for (int part = 0; part < 4; part++) {   // addresses count in units of 16 bytes
                    mma(d[0], left + 2 * part, right + RIGHT_PART * part, k | part);
                    mma(d[1], left + X_BYTES / 32 + 2 * part, right + RIGHT_PART * part, k | part);
                }
                mma_commit();
                if (k > 0) {
                    mma_wait<1>();
                    if (thread < 2) barrier_arrive(before, thread);
                }
                before = empty + 8 * ring.stage;
            }
            if (thread == 0) barrier_arrive(turn + 8 * (1 - group), rank);
            mma_wait<0>();
            if (thread < 2) barrier_arrive(before, thread);
#ifdef FORWARD
            finish(d, buffer, &out, bias, own, row, column, thread, group);
#else
            finish(d, buffer, &out, known, (float*)other, row, column, thread, group, tiles * COLS);
#endif
            ring.skip(turns);                        // the next tile is the other group's
        }
        if (thread == 0) store_wait();
    }
    // Nobody leaves while the other may still send to it.
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
