// The gradient of a convolution with stride 1 and a kernel of 3 x 3 by its weights, on Hopper's matrix units. Read
// planes.cuh first.
//
// A block takes FILTERS filters, CHANNELS channels, all elements of the window, and a part of the positions, which are k.
// Four warps gather POSITIONS positions of the gradients, four those of the images under their windows, and cut them in
// pieces; three warpgroups multiply, each a row of the window. An element of such a row is a position further on: of the
// images, which lie as lines of a position's channels, so many lines beginning one after another are one operand.
//
// As in conv_planes.cu, but for registers: the largest products and the others have the same ones in turn, over 64
// positions.
//
// Stages run on from image to image, or, where there are OF_IMAGE, so many begin with each image, and the rest of what lies
// between images is left out. IMAGE is then no less than their positions.
//
// REST: of each part, which are images then, only what conv_halves_weight_grad.cu has left.
#ifndef REST
#define REST 0
#endif
#ifndef OF_IMAGE
#define OF_IMAGE 0
#endif
#include "planes.cuh"

constexpr int FILTERS = 64, GATHERERS = WARPGROUP, CONSUMERS = KH * WARPGROUP;
constexpr int THREADS = 2 * GATHERERS + CONSUMERS, SUMMING = 256; // SUMMING: of a block of sum_parts
constexpr int SIZE = OUT_CHANNELS * IN_CHANNELS * TAPS;
constexpr int AT_A_TIME = 64, STEP = 16; // positions that are added up by the matrix units, and by one instruction
static_assert(KH == 3 && KW == 3 && CHANNELS == 32, "what the registers are made for");

// Lines of 64 bytes, a position's channels, whose words are exchanged.
struct OfImages {
    static constexpr int LINES = (POSITIONS + REACH + 7) / 8 * 8, PLANES = CHANNELS / GROUP_OF;
    static constexpr int LINE = CHANNELS * 2, PIECE = LINES * LINE, SIZE = PIECE_COUNT * PIECE; // bytes
    static __device__ __forceinline__ int offset(int piece, int plane, int line) {
        return piece * PIECE + line * LINE + (plane ^ line / 2 % 4) * WORD;
    }
};
typedef Planes<POSITIONS, FILTERS / GROUP_OF> OfGradients;
constexpr int STAGE = (OfImages::SIZE + OfGradients::SIZE + 1023) / 1024 * 1024, STAGES = 2;
constexpr int SUMS = KW * CHANNELS / 2, AHEAD = 4; // AHEAD: words that a thread has under way
typedef Images<OUT_CHANNELS, OUT_ROWS, OUT_COLUMNS> Gradients;

struct Stages {
    Barrier full[STAGES], empty[STAGES];

    __device__ void init() {
        for (int i = 0; i < STAGES; i++) {
            full[i].init(2 * GATHERERS / WARP);
            empty[i].init(CONSUMERS / WARP);
        }
        show_barriers();
    }
};

// What a block takes: filters and channels from the first ones on, and stages from begin to end, of images below `images`.
// REST the part's first image is `first`.
struct Part {
    int filter, channel, first = 0, begin, end, images;

    __device__ Part(int batch, int splits) : images(batch) {
        constexpr int across = (IN_CHANNELS + CHANNELS - 1) / CHANNELS;
        filter = blockIdx.x / across * FILTERS;
        channel = blockIdx.x % across * CHANNELS;
        const int64_t all = REST ? batch : OF_IMAGE > 0 ? batch * OF_IMAGE : parts(batch * IMAGE, POSITIONS);
        begin = all * blockIdx.y / splits;
        end = all * (blockIdx.y + 1) / splits;
        if (!REST) return;
        first = begin, images = end;
        begin = 0, end = parts((images - first) * IMAGE, POSITIONS);
    }
    __device__ __forceinline__ int position(int stage) const {
        constexpr int IN_A_ROW = OF_IMAGE > 0 ? OF_IMAGE : 1 << 30;
        return (first + stage / IN_A_ROW) * IMAGE + stage % IN_A_ROW * POSITIONS;
    }
};

// Brings the images' part of all stages, which begin `before` positions before those of the gradients.
template <class Layout, class Source> __device__ __forceinline__ void gather(const Part &part, const Source &images,
    int before, int channel, Stages &stages, char *shared, T *passing) {
    Round<STAGES> turn;
    for (int i = part.begin; i < part.end; i++, turn.next()) {
        images.template gather<Layout, GATHERERS, AHEAD>(PutPieces<Layout>{shared + turn.stage * STAGE}, passing,
            threadIdx.x % GATHERERS, part.position(i) - before, channel, stages.empty[turn.stage], turn.parity ^ 1);
        show_to_matrix_units();
        say(stages.full[turn.stage]);
    }
}

// The sums of a row of the window.
__device__ __forceinline__ void multiply(
    float (&main)[SUMS], const Part &part, int row, Stages &stages, const char *shared) {
    #pragma unroll
    for (int i = 0; i < SUMS; i++) main[i] = 0;
    Round<STAGES> turn;
    for (int i = part.begin; i < part.end; i++, turn.next()) {
        stages.full[turn.stage].wait(turn.parity);
        const char *stage = shared + turn.stage * STAGE;
        #pragma unroll 1
        for (int at = 0; at < POSITIONS; at += AT_A_TIME) {
            const uint64_t a = described(
                stage + OfImages::SIZE + at * WORD, UNIT_BYTES, OfGradients::PLANE, NOT_EXCHANGED);
            const uint64_t b = described(stage + (at + shift(row, 0)) * OfImages::LINE, DW * OfImages::LINE,
                8 * OfImages::LINE, WITHIN_64_BYTES);
            float sums[SUMS];
            const auto products = [&](Pair pieces, bool add) {
                #pragma unroll
                for (int k = 0; k < AT_A_TIME; k += STEP)
                    start_pieces<true, true>(sums, a + (pieces.a * OfGradients::PIECE + k * WORD) / WORD,
                        b + (pieces.b * OfImages::PIECE + k * OfImages::LINE) / WORD, add || k > 0);
            };
            const auto add = [&] {
                Started::end();
                Started::finished<0>();
                arrived(sums);
                #pragma unroll
                for (int i = 0; i < SUMS; i++) main[i] += sums[i];
            };
            Started::begin();
            #pragma unroll
            for (int i = 0; i < BESIDE; i++) products(beside(i), i > 0);
            add();
            Started::begin();
            products({0, 0}, false);
            add();
        }
        say(stages.empty[turn.stage]);
    }
}

// An element by plain multiply-adds.
__device__ __noinline__ T plain(
    const Part &part, const Inputs &images, const Gradients &gradients, int filter, int channel, int shift) {
    T sum = 0;
    for (int i = part.begin * POSITIONS; i < part.end * POSITIONS; i++) {
        const int position = part.position(i / POSITIONS) + i % POSITIONS;
        const int left = gradients.at(position), right = images.at(position - BEFORE + shift);
        if (left < 0) continue;
        const T x = right < 0 ? 0 : images.x[right + channel * Inputs::AREA];
        sum = fma(gradients.x[left + filter * Gradients::AREA], x, sum);
    }
    return sum;
}

// To w or, SPLIT, to scratch each of the parts. Pieces make NaN of infinities: what is not finite is
// computed again.
KERNEL __launch_bounds__(THREADS, 1) conv_planes_weight_grad(const T *x, const T *g, T *w, int64_t batch, int64_t splits
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
    const Gradients gradients = {g, part.images};
#if REST
    const int *left = (const int *)(w + splits * SIZE) + (blockIdx.y * gridDim.x + blockIdx.x) * KH;
    if (!(left[0] | left[1] | left[2])) return;
#endif
    char *shared = aligned_shared<1024>();
    T *passing = (T *)(shared + STAGES * STAGE);
    __shared__ Stages stages;
    if (threadIdx.x == 0) stages.init();
    __syncthreads();
    if (threadIdx.x < 2 * GATHERERS) {
        give_registers<48>();
        if (threadIdx.x < GATHERERS)
            gather<OfImages>(part, images, BEFORE, part.channel, stages, shared, passing);
        else
            gather<OfGradients>(part, gradients, 0, part.filter, stages, shared + OfImages::SIZE,
                passing + AHEAD * GROUP_OF * GATHERERS);
    } else {
        take_registers<128>();
        const int row = threadIdx.x / WARPGROUP - 2;
        float sums[SUMS];
        multiply(sums, part, row, stages, shared);
        #pragma unroll
        for (int i = 0; i < SUMS; i++) {
            const int filter = part.filter + sum_row(i), column = sum_column(i) / CHANNELS;
            const int channel = part.channel + sum_column(i) % CHANNELS;
            if (filter >= OUT_CHANNELS || channel >= IN_CHANNELS) continue;
            if (!finite(sums[i])) sums[i] = plain(part, images, gradients, filter, channel, shift(row, column));
            const int tap = row * KW + column, place = place_in_part(filter, channel, tap);
            w[blockIdx.y * (int64_t)SIZE + (SPLIT ? place : (filter * IN_CHANNELS + channel) * TAPS + tap)] = sums[i];
        }
    }
}

// w: (O, C, KH, KW), the sum of the parts, of which there are many of few elements: a warp of a block adds some of them,
// in their order.
KERNEL __launch_bounds__(SUMMING) sum_parts(const T *x, const T *g, T *w, int64_t batch, int64_t splits, char *scratch) {
    wait_for_inputs();
    constexpr int WARPS = SUMMING / WARP;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int element = blockIdx.x * WARP + lane;
    __shared__ T sums[WARPS][WARP];
    T sum = 0;
    if (element < SIZE) {
        #pragma unroll 8 // reads that are under way at once
        for (int i = splits * warp / WARPS; i < splits * (warp + 1) / WARPS; i++)
            sum += ((const T *)scratch)[(int64_t)i * SIZE + element];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || element >= SIZE) return;
    #pragma unroll
    for (int i = 1; i < WARPS; i++) sum += sums[i][lane];
    w[element % (OUT_CHANNELS * IN_CHANNELS) * TAPS + element / (OUT_CHANNELS * IN_CHANNELS)] = sum;
}
