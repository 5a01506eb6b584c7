// Weight gradient: images x (N, C, H, W) and output gradients g (N, O, OH, OW) to (O, C / groups, KH, KW). Read
// conv/implicit_gemm.cuh first.
//
// A matrix product for each group: rows are filters, columns the elements of a window, k the pixels of all outputs. K
// is long and is split; gemm/split_k_sum.cu sums the splits in order.
#include "conv/implicit_gemm.cuh"

// Pixel k of the outputs: its image, its offset in g's first filter, and the corner of its window.
struct Pixel {
    int image, at, y, x;
    __device__ Pixel(int k, int area, int columns)
        : image(k / area), at(k % area), y(at / columns * SH - PH), x(at % columns * SW - PW) {}
};

// Loads panels [pixel][filter] of g.
struct GradientLoader {
    typedef PanelsA At;
    const T *source; // the tile's first filter
    int64_t image_step;
    int area, columns, remaining, k, end; // remaining: filters from the tile's first one; k, end: pixels

    __device__ __forceinline__ void load(T *panel) {
        #pragma unroll
        for (int i = 0; i < At::COPIES; i++) {
            const int row = At::row(i), column = At::column(i);
            const Pixel pixel(k + row, area, columns);
            cp_async<sizeof(T)>(panel + row * At::ROW + column,
                source + pixel.image * image_step + column * area + pixel.at, k + row < end && column < remaining);
        }
        k += BK;
    }
};

// Loads panels [pixel][element of its window] of x.
struct ElementLoader {
    typedef PanelsB At;
    const T *source; // the group's first channel
    int64_t image_step;
    int height, width, area, columns, k, end;
    int offset[At::OWN], dy[At::OWN], dx[At::OWN]; // from the window's corner to the elements that this thread loads

    __device__ ElementLoader(
        const T *source, int64_t image_step, int height, int width, int area, int columns, int k, int end, int n0,
            int n)
        : source(source), image_step(image_step), height(height), width(width), area(area), columns(columns), k(k),
          end(end) {
        #pragma unroll
        for (int i = 0; i < At::OWN; i++) {
            const int element = n0 + At::column(i), tap = element % (KH * KW);
            dy[i] = element < n ? tap / KW * DH : OUTSIDE;
            dx[i] = tap % KW * DW;
            offset[i] = element / (KH * KW) * height * width + tap / KW * DH * width + dx[i];
        }
    }

    __device__ __forceinline__ void load(T *panel) {
        #pragma unroll
        for (int i = 0; i < At::COPIES; i++) {
            const int row = At::row(i), own = i % At::OWN;
            const Pixel pixel(k + row, area, columns);
            const bool inside =
                (unsigned)(pixel.y + dy[own]) < height && (unsigned)(pixel.x + dx[own]) < width && k + row < end;
            cp_async<sizeof(T)>(panel + row * At::ROW + At::column(i),
                source + pixel.image * image_step + (pixel.y * width + pixel.x + offset[own]), inside);
        }
        k += BK;
    }
};

KERNEL __launch_bounds__(THREADS, MIN_BLOCKS) conv2d_weight_grad(const T *x, const T *g, T *w, CONV_NUMBERS,
    int64_t splits IF(SPLIT, , char *scratch)) {
    wait_for_inputs();
    CONV
    const int elements = group_channels * KH * KW, area = rows * columns, pixels = batch * area, group = blockIdx.z;
    const int tiles_m = (group_filters + BM - 1) / BM;
    const int m0 = blockIdx.x % tiles_m * BM, n0 = blockIdx.x / tiles_m * BN;
    const int stages = (pixels + BK - 1) / BK;
    const int begin = (int64_t)stages * blockIdx.y / splits, end = (int64_t)stages * (blockIdx.y + 1) / splits;
    const int last = min(pixels, end * BK);
    BlockTile tile;

    GradientLoader gradients = {g + ((int64_t)group * group_filters + m0) * area, (int64_t)filters * area, area,
        columns, group_filters - m0, begin * BK, last};
    ElementLoader windows(x + (int64_t)group * group_channels * height * width, (int64_t)channels * height * width,
        height, width, area, columns, begin * BK, last, n0, elements);
    tile.multiply(gradients, windows, end - begin);
    if (tile.slice > 0) return;
#if SPLIT
    T *out = (T *)scratch + (int64_t)blockIdx.y * filters * elements;
#else
    T *out = w;
#endif
    write_tile(tile, Store{out}, m0, n0, group_filters, elements,
        [&](int element) { return OutputColumn{0, group * group_filters, 0, element, elements}; });
}
