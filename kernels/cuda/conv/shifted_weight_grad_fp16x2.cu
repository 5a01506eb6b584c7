// The gradients of conv/shifted_weight_grad_bf16x3.cu with operands in halves, three products instead of six, as far as these hold
// them, or, where they are rounded, one product: of images and of the outputs' gradients, both measured and laid out
// beforehand. Read conv/packed_images.cuh first.
//
// A block takes FILTERS filters, CHANNELS channels, all elements of the window, and a part of the images. One thread has
// the copies of lines on their way; three warpgroups multiply, each a row of the window, whose elements are a line further
// on each. An image's sums over GROUP positions have one scale. Left to pieces are parts
// - with images of which one is not held, or few products make a sum, or so small that squares of sums would not be
//   normal numbers;
// - whose sums are small beside the products;
// - with a sum that is small beside what small elements have lost.
// Of rounded operands it is images that are not held, and the last of these.
#ifndef HALVES_STAGES
#define HALVES_STAGES 3
#endif
#include "conv/packed_images.cuh"

constexpr int FILTERS = 64, BRINGING = WARPGROUP, CONSUMERS = KH * WARPGROUP, THREADS = BRINGING + CONSUMERS;
constexpr int STEP = 16, GROUP = 4 * STEP, STAGE_GROUPS = 2; // positions of an instruction; that are added up at once
static_assert(KH == 3 && KW == 3 && CHANNELS == OF_LINE, "what the registers are made for");

// An image's positions from its first output to its last: in groups, of which the last one may be short.
constexpr int STEPS = parts((OUT_ROWS - 1) * PITCH + OUT_COLUMNS, STEP), GROUPS = parts(STEPS, 4);
constexpr int LAST = STEPS - 4 * (GROUPS - 1), PASSES = parts(GROUPS, STAGE_GROUPS);
static_assert(STEPS * STEP <= IMAGE, "the next image begins behind them");

// Lines before position 0 of the gradients: those of the convolution that is the gradient by the images.
constexpr int AFTER = REACH - BEFORE, FRONT_OF_GRADIENTS = (AFTER + 7) / 8 * 8, SKIPPED = FRONT - BEFORE;
constexpr int SIZE = OUT_CHANNELS * IN_CHANNELS * TAPS, SUMS = KW * CHANNELS / 2;
constexpr float SMALLEST = 0x1p-80f; // of an image's scales, multiplied
typedef Images<OUT_CHANNELS, OUT_ROWS, OUT_COLUMNS> Gradients;

// A stage: of both numbers the images' lines; of both numbers the gradients', of 32 filters and of 32 more. Each begins at
// a multiple of eight lines, as words are exchanged, so up to seven of them are not needed.
struct Stage {
    static constexpr int POSITIONS = STAGE_GROUPS * GROUP;
    static constexpr int OF_IMAGES = (7 + POSITIONS + REACH + 7) / 8 * 8 * LINE, OF_GRADIENTS = (POSITIONS + 8) * LINE;
    static constexpr int GRADIENTS = NUMBERS * OF_IMAGES, SIZE = GRADIENTS + 2 * NUMBERS * OF_GRADIENTS; // bytes
};

static_assert(SHARED_BYTES >= 1024 + HALVES_STAGES * Stage::SIZE, "dynamic shared memory");

struct Scratch {
    float *sums; // of each part
    int *left;   // of each part, block and row of the window, whether it is left to pieces
    char *end;

    __device__ Scratch(char *scratch, int splits, int blocks)
        : sums((float *)scratch), left((int *)(sums + (int64_t)splits * SIZE)), end((char *)(left + splits * blocks * KH)) {}
};

// Images and gradients in halves, in scratch.
struct Operands {
    Laid images, gradients;

    __device__ Operands(const Scratch &scratch, int batch)
        : images(aligned_to_lines(scratch.end), batch, IN_CHANNELS, FRONT),
          gradients(aligned_to_lines(images.end()), batch, OUT_CHANNELS, FRONT_OF_GRADIENTS) {}
};
constexpr int BLOCKS = parts(OUT_CHANNELS, FILTERS) * parts(IN_CHANNELS, CHANNELS);

// First: statistics of images and gradients.
KERNEL __launch_bounds__(LAYING, LAYING_BLOCKS) measure_operands(
    const T *x, const T *g, T *w, int64_t batch, int64_t splits, char *scratch) {
    wait_for_inputs();
    const Operands laid(Scratch(scratch, splits, BLOCKS), batch);
    laid.images.measure(Inputs{x, (int)batch});
    laid.gradients.measure(Gradients{g, (int)batch});
}

// Then: both packed.
KERNEL __launch_bounds__(LAYING, LAYING_BLOCKS) pack_operands(
    const T *x, const T *g, T *w, int64_t batch, int64_t splits, char *scratch) {
    wait_for_inputs();
    const Operands laid(Scratch(scratch, splits, BLOCKS), batch);
    laid.gradients.lay(Gradients{g, (int)batch});
    laid.images.lay(Inputs{x, (int)batch});
}

// What a block takes.
struct Part {
    int filter, channel, begin, end; // images

    __device__ Part(int batch, int splits) {
        constexpr int across = parts(IN_CHANNELS, CHANNELS);
        filter = blockIdx.x / across * FILTERS;
        channel = blockIdx.x % across * CHANNELS;
        begin = (int64_t)batch * blockIdx.y / splits;
        end = (int64_t)batch * (blockIdx.y + 1) / splits;
    }
    // Whether its images are held, in all threads.
    __device__ __forceinline__ bool held(const Operands &laid) const {
        __shared__ bool left;
        left = false;
        __syncthreads();
        for (int i = begin + threadIdx.x; i < end; i += THREADS) {
            const Known &x = laid.images.known[i], &g = laid.gradients.known[i];
            if (!(x.share * g.share * Gradients::AREA >= FEW) || x.down * g.down < SMALLEST) left = true;
            if (max(laid.images.small[i], laid.gradients.small[i]) > MOST_SMALL) left = true;
        }
        __syncthreads();
        return !left;
    }
};

struct Stages {
    Mbarrier full[HALVES_STAGES], empty[HALVES_STAGES];

    __device__ void init() {
        for (int i = 0; i < HALVES_STAGES; i++) {
            full[i].init(1);
            empty[i].init(CONSUMERS / WARP);
        }
        fence_mbarrier_init();
    }
};

// The first lines of a stage, and how many of them are not needed.
struct Begin {
    int line, skipped;
    __device__ explicit Begin(int needed) : line(needed / 8 * 8), skipped(needed % 8) {}
};

// Of one thread.
__device__ __forceinline__ void bring(const Operands &laid, const Part &part, Stages &stages, char *shared) {
    PipelineState<HALVES_STAGES> turn;
    for (int image = part.begin; image < part.end; image++) {
        for (int pass = 0; pass < PASSES; pass++, turn.advance()) {
            const int position = image * IMAGE + pass * Stage::POSITIONS;
            const Begin of_images(position + SKIPPED), of_gradients(position + FRONT_OF_GRADIENTS);
            char *stage = shared + turn.stage * Stage::SIZE;
            stages.empty[turn.stage].wait(turn.phase ^ 1);
            Mbarrier &full = stages.full[turn.stage];
            full.arrive_expect_tx(Stage::SIZE);
            #pragma unroll
            for (int i = 0; i < NUMBERS; i++) {
                bulk_copy<Stage::OF_IMAGES>(stage + i * Stage::OF_IMAGES,
                    laid.images.at(i, part.channel / OF_LINE, of_images.line), full);
                #pragma unroll
                for (int j = 0; j < 2; j++)
                    bulk_copy<Stage::OF_GRADIENTS>(stage + Stage::GRADIENTS + (2 * i + j) * Stage::OF_GRADIENTS,
                        laid.gradients.at(i, min(part.filter / OF_LINE + j, laid.gradients.chunks - 1), of_gradients.line), full);
            }
        }
    }
}

// Adds the products of COUNT steps, scaled back.
template <int COUNT> __device__ __forceinline__ void multiply(float (&main)[SUMS], uint64_t a, uint64_t b, float scale) {
    float sums[SUMS];
    const auto products = [&](TermPair parts, bool add) {
        #pragma unroll
        for (int k = 0; k < COUNT; k++)
            wgmma<FP16X2, true, true>(sums, a + (parts.a * 2 * Stage::OF_GRADIENTS + k * STEP * LINE) / CHUNK_BYTES,
                b + (parts.b * Stage::OF_IMAGES + k * STEP * LINE) / CHUNK_BYTES, add || k > 0);
    };
    const auto add = [&](float scale) {
        wgmma_commit_group();
        wgmma_wait_group<0>();
        wgmma_fence_operand(sums);
        #pragma unroll
        for (int i = 0; i < SUMS; i++) main[i] = fma(sums[i], scale, main[i]);
    };
    if (NUMBERS == 2) {
        wgmma_fence();
        products({0, 1}, false);
        products({1, 0}, true);
        add(scale * LOW);
    }
    wgmma_fence();
    products({0, 0}, false);
    add(scale);
}

// What a part's sums are seen beside: the squares of products that one has on average; and what it must be, see FOR_SMALL.
struct Beside {
    float squares = 0, least = 0;
};

// The sums of a row of the window.
__device__ __forceinline__ Beside multiply(float (&main)[SUMS], const Operands &laid, const Part &part, int row,
    Stages &stages, const char *shared) {
    Beside beside;
    #pragma unroll
    for (int i = 0; i < SUMS; i++) main[i] = 0;
    PipelineState<HALVES_STAGES> turn;
    for (int image = part.begin; image < part.end; image++) {
        const Known x = laid.images.known[image], g = laid.gradients.known[image];
        const float scale = x.down * g.down;
        beside.squares += x.squares / Inputs::SIZE * (g.squares / OUT_CHANNELS) * scale * scale;
        beside.least += (laid.images.small[image] + laid.gradients.small[image]) * FOR_SMALL * scale;
        for (int pass = 0; pass < PASSES; pass++, turn.advance()) {
            const int position = image * IMAGE + pass * Stage::POSITIONS;
            const int of_images = Begin(position + SKIPPED).skipped;
            const int of_gradients = Begin(position + FRONT_OF_GRADIENTS).skipped;
            stages.full[turn.stage].wait(turn.phase);
            const char *stage = shared + turn.stage * Stage::SIZE;
            const uint64_t a = smem_descriptor(stage + Stage::GRADIENTS + of_gradients * LINE, Stage::OF_GRADIENTS, 8 * LINE,
                SWIZZLE_64B);
            const uint64_t b = smem_descriptor(stage + (of_images + shift(row, 0)) * LINE, DW * LINE, 8 * LINE, SWIZZLE_64B);
            #pragma unroll 1
            for (int i = 0; i < STAGE_GROUPS; i++) {
                const int group = pass * STAGE_GROUPS + i, further = i * GROUP * LINE / CHUNK_BYTES;
                if (group < GROUPS - 1)
                    multiply<4>(main, a + further, b + further, scale);
                else if (group == GROUPS - 1)
                    multiply<LAST>(main, a + further, b + further, scale);
            }
            arrive_per_warp(stages.empty[turn.stage]);
        }
    }
    return beside;
}

// To scratch: each of the parts.
KERNEL __launch_bounds__(THREADS, 1) conv_halves_weight_grad(
    const T *x, const T *g, T *w, int64_t batch, int64_t splits, char *scratch) {
    wait_for_inputs();
    const Scratch made(scratch, splits, BLOCKS);
    const Operands laid(made, batch);
    const Part part(batch, splits);
    int *left = made.left + (blockIdx.y * BLOCKS + blockIdx.x) * KH;
    char *shared = aligned_shared<1024>();
    __shared__ Stages stages;
    __shared__ float signs[CONSUMERS / WARP];
    if (threadIdx.x == 0) stages.init();
    if (!part.held(laid)) {
        if (threadIdx.x < KH) left[threadIdx.x] = true;
        return;
    }
    if (threadIdx.x < BRINGING) {
        warpgroup_reg_dealloc<40>();
        if (threadIdx.x == 0) bring(laid, part, stages, shared);
        return;
    }
    warpgroup_reg_alloc<152>();
    const int row = threadIdx.x / WARPGROUP - 1;
    float sums[SUMS];
    const Beside beside = multiply(sums, laid, part, row, stages, shared);
    float sign = any_below(sums, beside.least) ? -INFINITY : 0; // of the sums' squares less those of the products, over LEAST
    #pragma unroll
    for (int i = 0; i < SUMS; i++) {
        const int filter = part.filter + accumulator_row(i), column = accumulator_column(i) / CHANNELS;
        const int channel = part.channel + accumulator_column(i) % CHANNELS;
        if (filter >= OUT_CHANNELS || channel >= IN_CHANNELS) continue;
        if (NUMBERS == 2) sign += sums[i] * sums[i] - beside.squares / LEAST;
        made.sums[blockIdx.y * (int64_t)SIZE + place_in_part(filter, channel, row * KW + column)] = sums[i];
    }
    sign = over_lanes<Sum, WARP>(sign);
    float *of_row = signs + row * (WARPGROUP / WARP);
    if (threadIdx.x % WARP == 0) of_row[threadIdx.x % WARPGROUP / WARP] = sign;
    named_barrier_sync(WARPGROUP, 1 + row);
    if (threadIdx.x % WARPGROUP == 0) left[row] = !(of_row[0] + of_row[1] + of_row[2] + of_row[3] >= 0);
}
