// The gradient of a convolution with stride 1 and a kernel of 3 x 3 by its weights, behind which a max pooling of windows of
// 2 x 2 is, on Hopper's matrix units. Read conv/sparse_pool.cuh and conv/shifted_weight_grad.cuh first.
//
// Of k, the positions, the gradient's are its sparse operand: two neighbouring lines are four positions. All warps that
// bring a stage have images on their way while they put gradients to their places, and the other way round.
//
// As in conv/shifted_weight_grad_bf16x3.cu, over as many numbers that are not zero: all of a stage.
//
// BIAS: the gradient by the convolution's bias, too, which is the gradient times ones: a warpgroup has the products of a piece.
#include "conv/shifted_weight_grad.cuh"
#include "conv/sparse_pool.cuh"

constexpr int STEP = 32; // positions of one instruction
// Threads that have no line of the images take more of the gradient, where there are two warps of them or more.
constexpr int WITHOUT_IMAGES = BRINGING - (OfImages::LINES + WARP - 1) / WARP * WARP;
constexpr int HELPERS = WITHOUT_IMAGES < 2 * WARP ? BRINGING : WITHOUT_IMAGES;
typedef Planes<POSITIONS / 2, FILTERS / CHUNK_ELEMENTS> OfGradients; // of lines
typedef PooledGradients<OUT_CHANNELS, OUT_ROWS, OUT_COLUMNS> Gradients;

// Behind the gradient's pieces are bytes of each plane's lines: of each channel a bit, which of the line's positions it is.
constexpr int BITS = OfImages::SIZE + OfGradients::SIZE;
constexpr int STAGE = (BITS + OfGradients::PLANES * OfGradients::LINES + 1023) / 1024 * 1024;

// What is read of images passes behind the stages; behind that are STEP k of eight columns of ones.
constexpr int ONES = STAGES * STAGE + BRINGING * CHANNELS * (int)sizeof(T);
static_assert(SHARED_BYTES >= 1024 + ONES + BIAS * STEP * CHUNK_BYTES, "dynamic shared memory");

// Puts what Gathering finds to its place in a stage.
struct Put {
    char *stage;

    __device__ __forceinline__ void operator()(
        int plane, int line, const Chunk (&words)[BF16X3_TERMS], uint32_t which) const {
        #pragma unroll
        for (int p = 0; p < TERMS_USED; p++)
            *(Chunk *)(stage + OfImages::SIZE + OfGradients::offset(p, plane, line)) = words[p];
        stage[BITS + plane * OfGradients::LINES + line] = which;
    }
};

// A channel's bit of eight lines' bytes as wgmma_sparse wants it: two bits each, of every second line 2 or 3.
__device__ __forceinline__ uint32_t codes(uint64_t bytes, int bit) {
    constexpr uint32_t CLOSE = 1 << 24 | 1 << 18 | 1 << 12 | 1 << 6; // the lowest bits of bytes to every second of the last one
    const uint32_t first = (uint32_t)(bytes >> bit) & 0x01010101, second = (uint32_t)(bytes >> 32 >> bit) & 0x01010101;
    return (first * CLOSE >> 24 & 0x55) | (second * CLOSE >> 16 & 0x5500) | 0x8888;
}

// Of a warpgroup: the sums of a row of the window, and those of a piece of the gradient, for two rows of filters.
struct Sums {
    float main[SUMS], bias[2];
};

// Adds those over a stage. row: of the window, and the piece.
__device__ __forceinline__ void multiply(Sums &all, int row, const char *shared, int own_stage) {
    const char *stage = shared + own_stage * STAGE;
    const uint64_t a = smem_descriptor(stage + OfImages::SIZE, CORE_MATRIX_BYTES, OfGradients::PLANE, NO_SWIZZLE);
    const uint64_t b = smem_descriptor(
        stage + shift(row, 0) * OfImages::LINE, DW * OfImages::LINE, 8 * OfImages::LINE, SWIZZLE_64B);
    uint32_t which[POSITIONS / STEP]; // of a thread's two rows of filters, CHUNK_ELEMENTS apart
    #pragma unroll
    for (int k = 0; k < POSITIONS / STEP; k++) {
        const char *bits = stage + BITS + (k * STEP / 2 + threadIdx.x % 2 * CHUNK_ELEMENTS);
        const auto of_row = [&](int row) {
            return codes(*(const uint64_t *)(bits + row / CHUNK_ELEMENTS * OfGradients::LINES), row % CHUNK_ELEMENTS);
        };
        which[k] = of_row(accumulator_row(0)) | of_row(accumulator_row(2)) << 16;
    }
    float sums[SUMS], bias[4];
    const auto products = [&](TermPair pieces, bool add) {
        #pragma unroll
        for (int k = 0; k < POSITIONS / STEP; k++)
            wgmma_sparse<true, true>(sums, a + (pieces.a * OfGradients::PIECE + k * STEP / 2 * CHUNK_BYTES) / CHUNK_BYTES,
                b + (pieces.b * OfImages::PIECE + k * STEP * OfImages::LINE) / CHUNK_BYTES, which[k], add || k > 0);
    };
    const auto add = [&] {
        wgmma_commit_group();
        wgmma_wait_group<0>();
        wgmma_fence_operand(sums);
        #pragma unroll
        for (int i = 0; i < SUMS; i++) all.main[i] += sums[i];
    };
    if (LOW_ORDER_PAIRS > 0) {
        wgmma_fence();
        #pragma unroll
        for (int i = 0; i < LOW_ORDER_PAIRS; i++) products(low_order_pair(i), i > 0);
        add();
    }
    wgmma_fence();
    products({0, 0}, false);
#if BIAS
    const uint64_t b_of_ones = smem_descriptor(shared + ONES, CORE_MATRIX_BYTES, CORE_MATRIX_BYTES, NO_SWIZZLE);
    #pragma unroll
    for (int k = 0; k < POSITIONS / STEP; k++)
        wgmma_sparse<true, true>(
            bias, a + (row * OfGradients::PIECE + k * STEP / 2 * CHUNK_BYTES) / CHUNK_BYTES, b_of_ones, which[k], k > 0);
#endif
    add();
#if BIAS
    wgmma_fence_operand(bias);
    #pragma unroll
    for (int i = 0; i < 2; i++) all.bias[i] += bias[2 * i]; // the others are the same, of other ones
#endif
}

// An element by plain multiply-adds.
__device__ __noinline__ T plain(
    const Part &part, const Inputs &images, const Gradients &gradients, int filter, int channel, int tap) {
    T sum = 0;
    for (int i = part.begin * POSITIONS; i < part.end * POSITIONS; i++) {
        const int position = part.position(i / POSITIONS) + i % POSITIONS;
        const Output at(position);
        const int left = gradients.at(at.image, filter, at.y, at.x);
        const int right = images.at(position - BEFORE + shift(tap / KW, tap % KW));
        const T x = right < 0 ? 0 : rounded(images.x[right + channel * Inputs::AREA]);
        if (left >= 0) sum = fma(rounded(gradients.g[left]), x, sum);
    }
    return sum;
}

// The gradient by a bias by plain additions.
__device__ __noinline__ T plain(const Part &part, const Gradients &gradients, int filter) {
    T sum = 0;
    for (int i = part.begin * POSITIONS; i < part.end * POSITIONS; i++) {
        const Output at(part.position(i / POSITIONS) + i % POSITIONS);
        const int from = gradients.at(at.image, filter, at.y, at.x);
        if (from >= 0) sum += gradients.g[from];
    }
    return sum;
}

KERNEL __launch_bounds__(THREADS, 1) conv_pooled_weight_grad(
    const T *x, const T *g, const int32_t *where, T *w,
#if BIAS
    T *bias,
#endif
    int64_t batch, int64_t splits
#if SPLIT
    , char *scratch
#endif
) {
    wait_for_inputs();
#if SPLIT
    w = (T *)scratch;
#endif
    const Inputs images = {x, (int)batch};
    const Part part(batch, splits);
    const Gradients gradients = {g, where, (int)batch};
    char *shared = aligned_shared<1024>();
    __shared__ Stages stages;
    if (BIAS && threadIdx.x < STEP)
        *(Chunk *)(shared + ONES + threadIdx.x * CHUNK_BYTES) = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
    fence_proxy_async();
    if (threadIdx.x == 0) stages.init();
    __syncthreads();
    PipelineState<STAGES> turn;
    if (threadIdx.x < BRINGING) {
        warpgroup_reg_dealloc<56>();
        T *passing = (T *)(shared + STAGES * STAGE);
        Gathering<OfGradients, BRINGING, Gradients, HELPERS> gathering = {gradients, (int)threadIdx.x};
        const auto start_images = [&](int i) {
            if (i < part.end)
                images.start<OfImages, BRINGING>(passing, threadIdx.x, part.position(i) - BEFORE, part.channel);
        };
        const auto start_gradients = [&](int i) {
            if (i < part.end) gathering.start(part.position(i) / 2, part.filter);
        };
        start_images(part.begin);
        start_gradients(part.begin);
        #pragma unroll 1
        for (int i = part.begin; i < part.end; i++, turn.advance()) {
            char *stage = shared + turn.stage * STAGE;
            stages.empty[turn.stage].wait(turn.phase ^ 1);
            Inputs::finish<OfImages, BRINGING>(PutPieces<OfImages>{stage}, passing, threadIdx.x);
            start_images(i + 1);
            gathering.finish(Put{stage});
            fence_proxy_async();
            arrive_per_warp(stages.full[turn.stage]);
            start_gradients(i + 1);
        }
    } else {
        warpgroup_reg_alloc<120>();
        const int row = __shfl_sync(FULL_MASK, threadIdx.x / WARPGROUP - BRINGING / WARPGROUP, 0); // a whole warp's
        Sums sums = {};
        for (int i = part.begin; i < part.end; i++, turn.advance()) {
            stages.full[turn.stage].wait(turn.phase);
            multiply(sums, row, shared, turn.stage);
            arrive_per_warp(stages.empty[turn.stage]);
        }
        write(sums.main, part, row, w,
            [&](int filter, int channel, int tap) { return plain(part, images, gradients, filter, channel, tap); });
#if BIAS
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const int filter = part.filter + accumulator_row(2 * i);
            if (threadIdx.x % 4 != 0 || part.channel > 0 || filter >= OUT_CHANNELS) continue;
            T &to = w[blockIdx.y * (int64_t)PART + SIZE + row * OUT_CHANNELS + filter];
            to = finite(sums.bias[i]) ? sums.bias[i] : row == 0 ? plain(part, gradients, filter) : 0;
        }
#endif
    }
}

KERNEL __launch_bounds__(SUMMING) sum_parts(
    const T *x, const T *g, const int32_t *where, T *w,
#if BIAS
    T *bias,
#endif
    int64_t batch, int64_t splits, char *scratch) {
    wait_for_inputs();
#if !BIAS
    T *const bias = nullptr;
#endif
    add_parts(w, bias, splits, (const T *)scratch);
}
