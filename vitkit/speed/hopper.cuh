// What the kernels for Hopper share: barriers, copies between shared and device memory (TMA), products of a group of
// four warps (WGMMA, whose functions hopper.py writes). hopper.py puts this before a kernel's own source.
//
// Matrices in shared memory have rows of 64 bf16 numbers, 128 bytes, in which 16-byte pieces are permuted ("swizzled")
// so that eight rows can be read at once. A group of four warps computes 64 rows of a product, 16 each; `thread` counts
// within the group.

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) Map { u64 words[16]; };  // CUtensorMap

__device__ __forceinline__ u32 shared_address(void* at) {
    u32 found;
    asm("{ .reg .u64 p; cvta.to.shared.u64 p, %1; cvt.u32.u64 %0, p; }" : "=r"(found) : "l"(at));
    return found;
}

__device__ __forceinline__ void barrier_init(u32 at, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at), "r"(count) : "memory");
}

__device__ __forceinline__ void barriers_are_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrive at a barrier that also waits for this many bytes.
__device__ __forceinline__ void barrier_expect(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at) : "memory");
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

#define LOAD(D) "cp.async.bulk.tensor." D ".shared::cluster.global.mbarrier::complete_tx::bytes"
#define STORE(D) "cp.async.bulk.tensor." D ".global.shared::cta.bulk_group"

__device__ __forceinline__ void load(u32 to, const Map* map, int column, int row, u32 barrier) {
    asm volatile(LOAD("2d") " [%0], [%1, {%2, %3}], [%4];"
                 :: "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

__device__ __forceinline__ void load(u32 to, const Map* map, int column, int row, int image, u32 barrier) {
    asm volatile(LOAD("3d") " [%0], [%1, {%2, %3, %4}], [%5];"
                 :: "r"(to), "l"(map), "r"(column), "r"(row), "r"(image), "r"(barrier) : "memory");
}

// Load for both multiprocessors of a cluster.
__device__ __forceinline__ void load_for_both(u32 to, const Map* map, int column, int row, u32 barrier) {
    asm volatile(LOAD("2d") ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
                 :: "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "h"((unsigned short)3) : "memory");
}

__device__ __forceinline__ void store(const Map* map, int column, int row, u32 from) {
    asm volatile(STORE("2d") " [%0, {%1, %2}], [%3];" :: "l"(map), "r"(column), "r"(row), "r"(from) : "memory");
}

__device__ __forceinline__ void store(const Map* map, int column, int row, int image, u32 from) {
    asm volatile(STORE("3d") " [%0, {%1, %2, %3}], [%4];"
                 :: "l"(map), "r"(column), "r"(row), "r"(image), "r"(from) : "memory");
}

__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Let copies and products see what this thread has written to shared memory.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void mma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory");
}

// Describe a matrix in shared memory to a product, with the bytes from one box of 64 columns to the next. Addresses
// count in units of 16 bytes: 16 columns further is + 2, 16 rows further + 128.
__device__ __forceinline__ u64 described(u32 at, u32 boxes = 16) {
    return u64((at & 0x3FFFF) >> 4) | u64(boxes >> 4) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

__device__ __forceinline__ u32 packed(float a, float b) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
}

// Round 16 columns of a product, as this thread has them.
__device__ __forceinline__ void rounded(u32 (&pairs)[4], const float* v) {
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = packed(v[2 * i], v[2 * i + 1]);
}

// Write 16 columns of a warp's 16 rows, which begin at `row`, into a box.
__device__ __forceinline__ void to_shared(u32 box, int row, int column, int thread, const u32 (&v)[4]) {
    const int lane = thread & 31, own = row + (lane & 15), piece = column / 8 + (lane >> 4);
    const u32 at = box + own * 128 + ((piece ^ (own & 7)) << 4);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(at), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}

// Hand over one half of the columns to the thread whose number differs in one bit.
template <int STEP, int BIT> __device__ __forceinline__ void hand_over(float* sum, int lane) {
    const bool upper = lane & BIT;
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        float mine = upper ? sum[i + STEP] : sum[i], theirs = upper ? sum[i] : sum[i + STEP];
        sum[i] = mine + __shfl_xor_sync(0xFFFFFFFFu, theirs, BIT);
    }
}

// Sum over the eight threads of a warp that have the same columns; an eighth of the sums is left, at the beginning.
template <int COUNT> __device__ __forceinline__ void sum_rows(float (&sum)[COUNT], int lane) {
    hand_over<COUNT / 2, 16>(sum, lane);
    hand_over<COUNT / 4, 8>(sum, lane);
    hand_over<COUNT / 8, 4>(sum, lane);
}
