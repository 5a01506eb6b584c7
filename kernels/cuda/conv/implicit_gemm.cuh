// Convolution as implicit GEMM: a matrix product whose panels are gathered from the images while they are loaded. The
// matrix of windows, KH * KW times as large as the images, is never stored; shared memory holds BK rows of it.
//
// Macros: kernel KH x KW, stride SH x SW, padding PH x PW, dilation DH x DW, WIDE_C, SPLIT, and the tile (gemm/gemm.cu).
#pragma once
#include "common/epilogue.cuh"
#include "gemm/mma.cuh"

typedef Tile<TILE_M, TILE_N, TILE_K, TILE_SLICES, TILE_STAGES, WarpMma<WARP_M, WARP_N, MMA_KIND>::type, SHARED_BYTES> BlockTile;
typedef BlockTile::PanelsA PanelsA;
typedef BlockTile::PanelsB PanelsB;
constexpr int BM = TILE_M, BN = TILE_N, BK = TILE_K, THREADS = BlockTile::THREADS;

#define CONV_NUMBERS                                                                                                   \
    int64_t batch_, int64_t channels_, int64_t height_, int64_t width_, int64_t filters_, int64_t rows_,               \
        int64_t columns_, int64_t groups_
// Images are batch x channels x height x width, outputs batch x filters x rows x columns.
#define CONV                                                                                                           \
    const int batch = batch_, channels = channels_, height = height_, width = width_, filters = filters_,              \
              rows = rows_, columns = columns_, groups = groups_, group_channels = channels / groups,                  \
              group_filters = filters / groups;

constexpr int OUTSIDE = -(1 << 30); // a coordinate that is outside every image, also after adding a tap's offset

// Loads panels [k][pixel] of windows; k runs over channels, rows and columns of taps. A thread always has the same
// pixels (BN is a multiple of THREADS), and all threads have the same k, so that the work for k is uniform.
struct WindowLoader {
    static constexpr int OWN = BN / THREADS;
    const T *corner[OWN > 0 ? OWN : 1]; // element of channel 0 and tap (0, 0)
    int y[OWN > 0 ? OWN : 1], x[OWN > 0 ? OWN : 1]; // of the corner
    int channels, height, width; // of the images
    int taps_y, taps_x, step_y, step_x; // numbers of taps, and their distances
    int channel = 0, tap_y = 0, tap_x = 0; // of the next k

    __device__ WindowLoader(int channels, int height, int width, int taps_y, int taps_x, int step_y, int step_x)
        : channels(channels), height(height), width(width), taps_y(taps_y), taps_x(taps_x), step_y(step_y),
          step_x(step_x) {}

    __device__ __forceinline__ void set(int i, const T *image, int at_y, int at_x) {
        y[i] = at_y;
        x[i] = at_x;
        corner[i] = image + (int64_t)at_y * width + at_x;
    }

    __device__ __forceinline__ void load(T *panel) {
        #pragma unroll
        for (int row = 0; row < BK; row++) {
            const int dy = tap_y * step_y, dx = tap_x * step_x;
            const int64_t offset = (int64_t)channel * (height * width) + dy * width + dx;
            #pragma unroll
            for (int i = 0; i < OWN; i++) {
                const bool inside = (unsigned)(y[i] + dy) < height && (unsigned)(x[i] + dx) < width;
                cp_async<sizeof(T)>(panel + row * PanelsB::ROW + threadIdx.x + i * THREADS, corner[i] + offset,
                    inside && channel < channels);
            }
            if (++tap_x == taps_x) {
                tap_x = 0;
                if (++tap_y == taps_y) {
                    tap_y = 0;
                    channel++;
                }
            }
        }
    }
};

// The destination of a column: `pixel` of `area` pixels in an image of `channels` channels. `channel` is that of row 0.
struct OutputColumn {
    int image, channel, channels, pixel;
    int64_t area;
};

// The epilogue of a tile, for WIDE_C neighbouring columns at once; find(column) gives the first OutputColumn.
// Auxiliary inputs of a column are loaded before its first element is written.
template <class Out, class Find> __device__ __forceinline__ void write_tile(
    const BlockTile &tile, const Out &out, int m0, int n0, int m, int n, Find find) {
    #pragma unroll
    for (int j = 0; j < BlockTile::TN; j += WIDE_C) {
        const int column = n0 + tile.column(j);
        if (column >= n) continue;
        const OutputColumn at = find(column);
        const auto channel = [&](int i) { return at.channel + m0 + tile.row(i); };
        const auto index = [&](int i) { return ((int64_t)at.image * at.channels + channel(i)) * at.area + at.pixel; };
        typename Out::template Aux<WIDE_C> aux[BlockTile::TM];
        #pragma unroll
        for (int i = 0; i < BlockTile::TM; i++)
            if (m0 + tile.row(i) < m)
                aux[i] = out.template load_aux<WIDE_C>(at.image, channel(i), at.pixel, index(i));
        #pragma unroll
        for (int i = 0; i < BlockTile::TM; i++) {
            T value[WIDE_C];
            #pragma unroll
            for (int h = 0; h < WIDE_C; h++) value[h] = tile.sums[i][j + h];
            if (m0 + tile.row(i) < m) out.write(aux[i], index(i), value);
        }
    }
}
