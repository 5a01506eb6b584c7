// Convolutions of stride 1, and their input gradients, by filters that fit in shared memory. Read conv/bfloat16_conv.cuh first.
// Operands are bfloat16 in memory, or with IN_TF32 float32: then the filters of INPUT_GRAD are C x KH x KW x O, and the producer
// warps round. An input gradient is a convolution of g by the filters with their taps in reverse order.
//
// Rows of the result are positions: the pixels of all images one after another, with PAD_X zeros after each line and PAD_Y lines of
// zeros after each image. Zeros before a line or an image are those of the one before. So a tap reads the position at a fixed
// distance, its shift. A stage holds all positions that a tile reads, so each element is copied once for all taps. It has a plane for
// each chunk of channels, 16 bytes, with a chunk for each position. Eight positions are a core matrix of WGMMA without swizzle, which
// may begin at any of them. K has the taps of the first plane, those of the second one, and so on. A block loads the filters once.
//
// More macros: IMAGE_H x IMAGE_W x IMAGE_C, OUTPUT_H x OUTPUT_W x OUTPUT_C: the lengths of x and y. STAGE_BYTES: bytes of a stage.
#include "common/common.cuh"
#include "common/rounding.cuh"
#include "conv/bfloat16_conv.cuh"

constexpr int CHUNK_BYTES = 16, CHUNK = CHUNK_BYTES / ELEMENT; // bytes and channels of a chunk
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
template <bool FLOAT> struct ElementOf { typedef uint16_t Type; };
template <> struct ElementOf<true> { typedef float Type; };
typedef ElementOf<IN_TF32>::Type Element;

// Copies `count` chunks to shared memory, each thread every WARPGROUP-th of them. place(i, to, from) sets where chunk i goes, and
// where it is in memory. If it returns false, the chunk is zeros.
template <int UNROLL, class Place> __device__ __forceinline__ void copy_chunks(int count, const Place &place) {
    if constexpr (IN_TF32) {
        constexpr int AHEAD = 8;
        #pragma unroll 1
        for (int first = threadIdx.x; first < count; first += AHEAD * WARPGROUP) {
            Vector<Element, CHUNK> held[AHEAD];
            char *to[AHEAD];
            #pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                const Element *from;
                const bool inside = place(min(first + k * WARPGROUP, count - 1), to[k], from);
                held[k] = load<Element, CHUNK>(from);
                #pragma unroll
                for (int j = 0; j < CHUNK; j++) held[k].lane[j] = inside ? rounded(held[k].lane[j]) : 0;
            }
            #pragma unroll
            for (int k = 0; k < AHEAD; k++) store((Element *)to[k], 0, held[k]);
        }
    } else {
        #pragma unroll UNROLL
        for (int i = threadIdx.x; i < count; i += WARPGROUP) {
            char *to;
            const Element *from;
            const bool inside = place(i, to, from);
            cp_async<CHUNK_BYTES, true>((Element *)to, from, inside);
        }
    }
}

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
    const Element *images, *filters;
    int n;

    __device__ __forceinline__ Work work(int64_t whole) const { return Work(1, (int64_t)n * AREA, COLUMNS, whole); }
    __device__ __forceinline__ int k_tiles(int64_t) const { return 1; }

    // The filters: for the k of a chunk of the first plane and tap, the columns, and so on. The chunks are of a column, if B is
    // K-major.
    __device__ __forceinline__ void load_once(char *shared) const {
        copy_chunks<1>(2 * Planes::WGMMAS * TILE_N, [&](int i, char *&to, const Element *&from) {
            const int chunk = i / TILE_N, within = i % TILE_N, plane = chunk / TAPS, tap = chunk % TAPS;
            const int k = MN_MAJOR_B ? plane * CHUNK + within % CHUNK : plane * CHUNK;
            const int column = MN_MAJOR_B ? within / CHUNK * CHUNK : within, read_tap = OF_GRADIENT ? TAPS - 1 - tap : tap;
            const bool inside = chunk < K_CHUNKS && k < CHANNELS && column < COLUMNS;
            const int at = MN_MAJOR_B ? (k * TAPS + read_tap) * COLUMNS + column : (column * TAPS + read_tap) * CHANNELS + k;
            to = Planes::filters(shared) + i * CHUNK_BYTES;
            from = filters + (inside ? at : 0);
            return inside;
        });
    }
    __device__ __forceinline__ auto load_a(const TileSplit &own) const {
        return [images = images, n = n, first = own.row - FIRST](int, char *stage, Mbarrier &) {
            copy_chunks<2>(POSITIONS * PLANES, [&](int i, char *&to, const Element *&from) {
                const int row = i / PLANES, plane = i % PLANES;
                const Position at(max(first + row, 0));
                const bool inside = first + row >= 0 && at.image < n && at.y < HEIGHT && at.x < WIDTH;
                const int place = ((at.image * HEIGHT + at.y) * WIDTH + at.x) * CHANNELS + plane * CHUNK;
                to = stage + plane * PLANE_BYTES + row * CHUNK_BYTES;
                from = images + (inside ? place : 0);
                return inside;
            });
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
    const Element *images, const Element *filters, const Epilogue epilogue, int64_t n, int64_t whole, char *scratch) {
    const Images product = IMAGES;
    multiply(product.work(whole), product, epilogue, scratch);
}
