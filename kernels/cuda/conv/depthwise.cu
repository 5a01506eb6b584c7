// Depthwise convolutions of images that are channels last, and their gradients, by FMA: filter i has one channel, channel i of x.
// y = x * w; x: N x H x W x C, y and its gradient g: N x OH x OW x C, w: C x KH x KW. Operands are bfloat16 in memory, or float32
// (OPERANDS_FLOAT32).
//
// They are bound by memory traffic, and L1 serves the pixels that several taps read. A thread computes CHUNK channels of STRIP
// neighbouring pixels of the result. So it reads each chunk of a row of pixels once for all taps of a row of the filter. For a
// weight gradient it adds the products of all its strips of g with TAP_ROWS rows of taps. These sums, and those of an epilogue
// (Epilogue::SUMS), are added over the threads of a block in a fixed order. Another launch adds those of all blocks.
//
// Macros (DepthwiseConv in conv/depthwise.py): DIRECTION; kernel KH x KW, stride SH x SW, padding PH x PW, dilation DH x DW;
// IMAGE_H x IMAGE_W, OUTPUT_H x OUTPUT_W: the lengths of x and y; CHANNELS. STRIP; TAP_ROWS. A block has BLOCK_CHUNKS chunks of
// channels, BLOCK_STRIPS strips of a row, and BLOCK_ROWS rows.
#include "common/collectives.cuh"
#include "common/epilogue.cuh"

enum { FORWARD, INPUT_GRAD, WEIGHT_GRAD };
constexpr int TAPS = KH * KW, CHUNK = 8, RESIDENT = 2; // RESIDENT: blocks of a multiprocessor
constexpr int THREADS = BLOCK_CHUNKS * BLOCK_STRIPS * BLOCK_ROWS;
// The images that windows read, and those that strips are of: the result, or g for a weight gradient.
constexpr int READ_H = DIRECTION == INPUT_GRAD ? OUTPUT_H : IMAGE_H, READ_W = DIRECTION == INPUT_GRAD ? OUTPUT_W : IMAGE_W;
constexpr int ROWS = DIRECTION == INPUT_GRAD ? IMAGE_H : OUTPUT_H, COLUMNS = DIRECTION == INPUT_GRAD ? IMAGE_W : OUTPUT_W;
constexpr int STRIPS = (COLUMNS + STRIP - 1) / STRIP, ACROSS = (STRIPS + BLOCK_STRIPS - 1) / BLOCK_STRIPS; // of a row; in blocks
static_assert(DIRECTION != INPUT_GRAD || STRIP % SW == 0, "all strips begin in the same phase");
typedef Vector<T, CHUNK> Numbers;
#if OPERANDS_FLOAT32
typedef float Element;
#else
typedef bfloat16 Element;
#endif

// Whether pixel `i` of a strip has a product with tap `s` of a row of the filter. In an input gradient of stride SW it has some taps.
__device__ constexpr bool meets(int i, int s) { return DIRECTION != INPUT_GRAD || (i + PW - s * DW) % SW == 0; }
// The column that it reads then. Column 0 is that of the first pixel of the strip, divided or multiplied by the stride.
__device__ constexpr int column_of(int i, int s) {
    return DIRECTION == INPUT_GRAD ? (i + PW - s * DW) / SW : i * SW - PW + s * DW;
}
__device__ constexpr int end_column(bool last) {
    int found = last ? -(1 << 30) : 1 << 30;
    for (int i = 0; i < STRIP; i++)
        for (int s = 0; s < KW; s++) {
            const int column = column_of(i, s);
            if (meets(i, s) && (last ? column > found : column < found)) found = column;
        }
    return found;
}
constexpr int FIRST = end_column(false), SPAN = end_column(true) - FIRST + 1; // columns that a strip reads

// A strip of pixels, and the channels of a thread.
struct Strip {
    int image, y, x, channel;
    bool inside;

    // Strip of a tile: the strips of a block, one for each of its threads.
    __device__ __forceinline__ Strip(int tile, int images, int channel) : channel(channel) {
        const int strip = threadIdx.x / BLOCK_CHUNKS % BLOCK_STRIPS, row = threadIdx.x / (BLOCK_CHUNKS * BLOCK_STRIPS);
        const int line = tile / ACROSS * BLOCK_ROWS + row;
        image = line / ROWS, y = line % ROWS, x = (tile % ACROSS * BLOCK_STRIPS + strip) * STRIP;
        inside = image < images && x < COLUMNS && channel < CHANNELS;
    }
    // The row that the taps of a row of the filter read; negative if there is none.
    __device__ __forceinline__ int row_of(int tap_row) const {
        const int at = DIRECTION == INPUT_GRAD ? y + PH - tap_row * DH : y * SH - PH + tap_row * DH;
        const int row = DIRECTION == INPUT_GRAD && at % SH == 0 ? at / SH : at;
        const bool read = DIRECTION != INPUT_GRAD || at % SH == 0;
        return read && at >= 0 && row < READ_H ? row : -1;
    }
    // Loads the columns that the strip reads of a row, and calls product(i, s, numbers) for each pixel and tap that they meet.
    template <class Product> __device__ __forceinline__ void multiply(
        const Element *images, int row, const Product &product) const {
        const int first = (DIRECTION == INPUT_GRAD ? x / SW : x * SW) + FIRST;
        const Element *const from = images + ((int64_t)(image * READ_H + row) * READ_W + first) * CHANNELS + channel;
        #pragma unroll
        for (int column = 0; column < SPAN; column++) {
            Numbers numbers = {};
            if ((unsigned)(first + column) < READ_W) numbers = load_as<T, CHUNK>(from + column * CHANNELS);
            #pragma unroll
            for (int i = 0; i < STRIP; i++)
                #pragma unroll
                for (int s = 0; s < KW; s++)
                    if (meets(i, s) && column_of(i, s) - FIRST == column) product(i, s, numbers);
        }
    }
    __device__ __forceinline__ int pixel(int i) const { return (image * ROWS + y) * COLUMNS + x + i; }
};
__device__ __forceinline__ int own_chunk() { return threadIdx.x % BLOCK_CHUNKS; }
__device__ __forceinline__ int tiles(int images) { return (images * ROWS + BLOCK_ROWS - 1) / BLOCK_ROWS * ACROSS; }

__device__ __forceinline__ void add_products(T (&sums)[CHUNK], const Numbers &a, const Numbers &b) {
    #pragma unroll
    for (int k = 0; k < CHUNK; k++) sums[k] = fma(a.lane[k], b.lane[k], sums[k]);
}

// Adds CHUNK numbers of each thread over the threads with the same channels, in order. For each channel of the block one of them
// calls store(channel, sum); channels are numbered from 0.
template <class Store> __device__ __forceinline__ void add_over_threads(const T (&numbers)[CHUNK], const Store &store) {
    __shared__ T added[BLOCK_STRIPS * BLOCK_ROWS][BLOCK_CHUNKS * CHUNK];
    #pragma unroll
    for (int k = 0; k < CHUNK; k++) added[threadIdx.x / BLOCK_CHUNKS][own_chunk() * CHUNK + k] = numbers[k];
    __syncthreads();
    for (int own = threadIdx.x; own < BLOCK_CHUNKS * CHUNK; own += THREADS) {
        T sum = 0;
        #pragma unroll 8 // loads in flight
        for (int i = 0; i < BLOCK_STRIPS * BLOCK_ROWS; i++) sum += added[i][own];
        store(own, sum);
    }
    __syncthreads();
}

#if DIRECTION < 2
// The results of a thread for its strips, and the sums of what the epilogue adds.
template <class Out> struct Results {
    static constexpr int WIDE = CHUNK < Out::WIDEST ? CHUNK : Out::WIDEST, PARTS = CHUNK / WIDE;
    static constexpr int SUMS = Out::SUMS > 0 ? Out::SUMS : 1;
    typedef typename Out::template Aux<WIDE> Aux;

    const Out &out;
    T totals[SUMS][CHUNK] = {};

    __device__ __forceinline__ void store(const Strip &strip, const T (&sums)[STRIP][CHUNK]) {
        Aux aux[STRIP][PARTS];
        #pragma unroll
        for (int i = 0; i < STRIP; i++)
            #pragma unroll
            for (int p = 0; p < PARTS; p++)
                if (strip.x + i < COLUMNS)
                    aux[i][p] = out.template load_aux<WIDE>(0, strip.pixel(i), strip.channel + p * WIDE, index(strip, i, p));
        #pragma unroll
        for (int i = 0; i < STRIP; i++)
            #pragma unroll
            for (int p = 0; p < PARTS; p++) {
                T value[WIDE];
                #pragma unroll
                for (int k = 0; k < WIDE; k++) value[k] = sums[i][p * WIDE + k];
                if (strip.x + i < COLUMNS) write(aux[i][p], strip, i, p, value);
            }
    }
    // Writes the totals of the block: sums[block][sum][channel].
    __device__ __forceinline__ void store_totals(int first, T *sums) const {
        #pragma unroll
        for (int n = 0; n < Out::SUMS; n++)
            add_over_threads(totals[n], [&](int channel, T sum) {
                const int64_t row = (int64_t)blockIdx.x * SUMS + n;
                if (first + channel < CHANNELS) sums[row * CHANNELS + first + channel] = sum;
            });
    }

  private:
    __device__ __forceinline__ static int64_t index(const Strip &strip, int i, int part) {
        return (int64_t)strip.pixel(i) * CHANNELS + strip.channel + part * WIDE;
    }
    __device__ __forceinline__ void write(const Aux &aux, const Strip &strip, int i, int part, const T (&value)[WIDE]) {
        if constexpr (Out::SUMS == 0) {
            out.write(aux, index(strip, i, part), value);
        } else {
            T addends[SUMS][WIDE];
            out.write(aux, index(strip, i, part), strip.channel + part * WIDE, value, addends);
            #pragma unroll
            for (int k = 0; k < SUMS * WIDE; k++) totals[k / WIDE][part * WIDE + k % WIDE] += addends[k / WIDE][k % WIDE];
        }
    }
};

// A convolution, or the gradient of its input. Blocks of a row of the grid have the same channels.
KERNEL __launch_bounds__(THREADS, RESIDENT) depthwise_conv(
    const Element *images, const Element *filters, const Epilogue epilogue, int64_t batch, char *scratch) {
    wait_for_inputs();
    __align__(16) __shared__ T weights[TAPS][BLOCK_CHUNKS * CHUNK];
    const int first = blockIdx.y * BLOCK_CHUNKS * CHUNK, count = tiles(batch);
    for (int i = threadIdx.x; i < TAPS * BLOCK_CHUNKS * CHUNK; i += THREADS) {
        const int own = i / TAPS, tap = i % TAPS;
        weights[tap][own] = first + own < CHANNELS ? (T)filters[(first + own) * TAPS + tap] : (T)0;
    }
    __syncthreads();
    Results<Epilogue> results = {epilogue};
    for (int tile = blockIdx.x; tile < count; tile += gridDim.x) {
        const Strip strip(tile, batch, first + own_chunk() * CHUNK);
        if (!strip.inside) continue;
        T sums[STRIP][CHUNK] = {};
        #pragma unroll 1
        for (int r = 0; r < KH; r++) {
            const int row = strip.row_of(r);
            if (row < 0) continue;
            Numbers taps[KW];
            #pragma unroll
            for (int s = 0; s < KW; s++) taps[s] = load<T, CHUNK>(&weights[r * KW + s][own_chunk() * CHUNK]);
            strip.multiply(images, row, [&](int i, int s, const Numbers &x) { add_products(sums[i], x, taps[s]); });
        }
        results.store(strip, sums);
    }
    results.store_totals(first, (T *)scratch);
}
#else
constexpr int TAP_PARTS = (KH + TAP_ROWS - 1) / TAP_ROWS;

// The sums of each split: scratch[channel][tap][split]. A row of the grid has the same channels and rows of taps.
KERNEL __launch_bounds__(THREADS, RESIDENT) depthwise_weight_grad(
    const Element *x, const Element *g, const Epilogue epilogue, int64_t batch, char *scratch) {
    wait_for_inputs();
    const int first = blockIdx.y / TAP_PARTS * BLOCK_CHUNKS * CHUNK, count = tiles(batch);
    const int first_row = blockIdx.y % TAP_PARTS * TAP_ROWS;
    T sums[TAP_ROWS][KW][CHUNK] = {};
    for (int tile = blockIdx.x; tile < count; tile += gridDim.x) {
        const Strip strip(tile, batch, first + own_chunk() * CHUNK);
        if (!strip.inside) continue;
        Numbers gradients[STRIP] = {};
        #pragma unroll
        for (int i = 0; i < STRIP; i++)
            if (strip.x + i < COLUMNS)
                gradients[i] = load_as<T, CHUNK>(g + (int64_t)strip.pixel(i) * CHANNELS + strip.channel);
        #pragma unroll
        for (int r = 0; r < TAP_ROWS; r++) {
            const int row = first_row + r < KH ? strip.row_of(first_row + r) : -1;
            if (row < 0) continue;
            strip.multiply(x, row, [&](int i, int s, const Numbers &a) { add_products(sums[r][s], a, gradients[i]); });
        }
    }
    #pragma unroll
    for (int r = 0; r < TAP_ROWS; r++)
        #pragma unroll
        for (int s = 0; s < KW; s++)
            add_over_threads(sums[r][s], [&](int channel, T sum) {
                const int64_t result = (int64_t)(first + channel) * TAPS + (first_row + r) * KW + s;
                if (first + channel < CHANNELS && first_row + r < KH)
                    ((T *)scratch)[result * gridDim.x + blockIdx.x] = sum;
            });
}

// The sums over splits: a warp for each result.
KERNEL sum_depthwise_weight_grad(
    const Element *x, const Element *g, const Epilogue epilogue, int64_t splits, char *scratch) {
    wait_for_inputs();
    for (int i = grid_index() / WARP; i < CHANNELS * TAPS; i += grid_size() / WARP) {
        T sum = 0;
        #pragma unroll 8 // loads in flight
        for (int split = threadIdx.x % WARP; split < splits; split += WARP)
            sum += ((const T *)scratch)[(int64_t)i * splits + split];
        const T total[] = {over_lanes<Sum, WARP>(sum)};
        if (threadIdx.x % WARP == 0) epilogue(0, i / TAPS, i % TAPS, i, total);
    }
}
#endif
