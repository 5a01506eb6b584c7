// Convolutions of stride 1 of images that are bfloat16 in memory, and their input gradients, by filters that fit in shared memory.
// Read conv/bfloat16_conv.cuh first. An input gradient is a convolution of g by the filters with their taps in reverse order.
//
// Rows of the result are positions: the pixels of all images one after another, with PAD_X zeros after each line and PAD_Y lines of
// zeros after each image. Zeros before a line or an image are those of the one before. So a tap reads the position at a fixed
// distance, its shift. A stage holds all positions that a tile reads, so each element is copied once for all taps. It has a plane for
// eight channels, with a chunk of 16 bytes for each position. Eight positions are a core matrix of WGMMA without swizzle, which may
// begin at any of them. K has the taps of the first plane, those of the second one, and so on. A block loads the filters once.
//
// More macros: IMAGE_H x IMAGE_W x IMAGE_C, OUTPUT_H x OUTPUT_W x OUTPUT_C: the lengths of x and y. STAGE_BYTES: bytes of a stage.
#include "common/common.cuh"
#include "conv/bfloat16_conv.cuh"

constexpr int CHUNK = 8, CHUNK_BYTES = 16;            // channels and bytes of a chunk
constexpr bool OF_GRADIENT = DIRECTION == INPUT_GRAD; // whether images are g, and the result is the gradient of x
constexpr int HEIGHT = OF_GRADIENT ? OUTPUT_H : IMAGE_H, WIDTH = OF_GRADIENT ? OUTPUT_W : IMAGE_W; // of images
constexpr int CHANNELS = OF_GRADIENT ? OUTPUT_C : IMAGE_C, COLUMNS = OF_GRADIENT ? IMAGE_C : OUTPUT_C;
constexpr int RESULT_H = OF_GRADIENT ? IMAGE_H : OUTPUT_H, RESULT_W = OF_GRADIENT ? IMAGE_W : OUTPUT_W;
constexpr int PAD_Y = OF_GRADIENT ? (KH - 1) * DH - PH : PH, PAD_X = OF_GRADIENT ? (KW - 1) * DW - PW : PW;
constexpr int LINE = WIDTH + PAD_X, AREA = (HEIGHT + PAD_Y) * LINE; // positions
constexpr int FIRST = PAD_Y * LINE + PAD_X;           // positions from the pixel that the first tap reads to the result's
constexpr int PLANES = CHANNELS / CHUNK, K_CHUNKS = PLANES * TAPS;

// Positions of a stage. Lanes that copy the planes of a position write to different banks.
constexpr int POSITIONS = TILE_M + (KH - 1) * DH * LINE + (KW - 1) * DW;
constexpr int SPREAD = PLANES < 5 ? (8 + PLANES - 1) / PLANES % 8 : 1;
constexpr int PLANE_BYTES = (POSITIONS + (SPREAD + 8 - POSITIONS % 8) % 8) * CHUNK_BYTES;
constexpr int FILTER_BYTES = TILE_N * CHUNK_BYTES;    // of a chunk of K of the filters
typedef uint16_t Bits;

// The position in a stage of chunk `i` of K, in bytes. A chunk after the last one is multiplied by zeros.
__device__ __forceinline__ constexpr int shift(int i) {
    const int chunk = i < K_CHUNKS ? i : K_CHUNKS - 1, tap = chunk % TAPS;
    return chunk / TAPS * PLANE_BYTES + (tap / KW * DH * LINE + tap % KW * DW) * CHUNK_BYTES;
}

// A stage, in planes.
struct Planes {
    static constexpr int BYTES = STAGE_BYTES, WGMMAS = (K_CHUNKS + 1) / 2;
    static_assert(BYTES == PLANES * PLANE_BYTES, "as the host computes it");

    __device__ __forceinline__ static void start_product(
        float (&sums)[SUMS], const char *shared, int at, int first, int step, TermPair, bool add) {
        const char *const a = shared + at * BYTES + first * CHUNK_BYTES + shift(2 * step);
        const char *const b = filters((char *)shared) + 2 * step * FILTER_BYTES;
        wgmma<KIND, MN_MAJOR_A, MN_MAJOR_B>(sums,
            smem_descriptor(a, shift(2 * step + 1) - shift(2 * step), 8 * CHUNK_BYTES, NO_SWIZZLE),
            smem_descriptor(b, FILTER_BYTES, 8 * CHUNK_BYTES, NO_SWIZZLE), add);
    }
    __device__ __forceinline__ static char *filters(char *shared) { return shared + TILE_STAGES * BYTES; }
};

// A position of all images.
struct Position {
    int image, y, x;
    __device__ __forceinline__ explicit Position(int i) : image(i / AREA), y(i % AREA / LINE), x(i % AREA % LINE) {}
};

struct Images {
    typedef Planes Stage;
    const Bits *images, *filters;
    int n;

    __device__ __forceinline__ Work work(int64_t whole) const { return Work(1, (int64_t)n * AREA, COLUMNS, whole); }
    __device__ __forceinline__ int k_tiles(int64_t) const { return 1; }

    // The filters: for eight k of the first plane and tap, the columns, and so on. For FORWARD the chunks are of a column.
    __device__ __forceinline__ void load_once(char *shared) const {
        #pragma unroll 1
        for (int i = threadIdx.x; i < 2 * Planes::WGMMAS * TILE_N; i += WARPGROUP) {
            const int chunk = i / TILE_N, within = i % TILE_N, plane = chunk / TAPS, tap = chunk % TAPS;
            const int filter = OF_GRADIENT ? plane * CHUNK + within % CHUNK : within;
            const int channel = OF_GRADIENT ? within / CHUNK * CHUNK : plane * CHUNK;
            const int from = (filter * TAPS + (OF_GRADIENT ? TAPS - 1 - tap : tap)) * IMAGE_C + channel;
            const bool inside = chunk < K_CHUNKS && filter < OUTPUT_C && channel < IMAGE_C;
            cp_async<CHUNK_BYTES, true>((Bits *)(Planes::filters(shared) + i * CHUNK_BYTES), filters + (inside ? from : 0), inside);
        }
    }
    __device__ __forceinline__ auto load_a(const TileSplit &own) const {
        return [images = images, n = n, first = own.row - FIRST](int, char *stage, Mbarrier &) {
            #pragma unroll 2
            for (int i = threadIdx.x; i < POSITIONS * PLANES; i += WARPGROUP) {
                const int row = i / PLANES, plane = i % PLANES;
                const Position at(max(first + row, 0));
                const bool inside = first + row >= 0 && at.image < n && at.y < HEIGHT && at.x < WIDTH;
                const int from = ((at.image * HEIGHT + at.y) * WIDTH + at.x) * CHANNELS + plane * CHUNK;
                char *const to = stage + plane * PLANE_BYTES + row * CHUNK_BYTES;
                cp_async<CHUNK_BYTES, true>((Bits *)to, images + (inside ? from : 0), inside);
            }
        };
    }
    __device__ __forceinline__ auto load_b(const TileSplit &) const {
        return [](int, char *, Mbarrier &) {};
    }

    // The places of results in memory. Positions of zeros have no result.
    struct Tile : AccumulatorTile {
        __device__ __forceinline__ bool inside(int row, int column) const {
            const Position at(row);
            return row < m && column < n && at.y < RESULT_H && at.x < RESULT_W;
        }
        __device__ __forceinline__ int memory_row(int row) const {
            const Position at(row);
            return (at.image * RESULT_H + min(at.y, RESULT_H - 1)) * RESULT_W + min(at.x, RESULT_W - 1);
        }
        __device__ __forceinline__ int64_t index(int row, int column) const {
            return opaque((int64_t)memory_row(row) * n + column);
        }
    };
    __device__ __forceinline__ Tile tile(const TileSplit &own, int row, int column) const {
        return {{own.at, n * AREA, COLUMNS, row, column}};
    }
};

#define IMAGES Images{images, filters, (int)n}

KERNEL __launch_bounds__(THREADS, 1) bfloat16_shift(
    const Bits *images, const Bits *filters, const Epilogue epilogue, int64_t n, int64_t whole, char *scratch) {
    const Images product = IMAGES;
    multiply(product.work(whole), product, epilogue, scratch);
}
