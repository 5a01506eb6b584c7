// Images in fp16x2, packed for bulk copies. A first launch measures parts of images, a second one packs them. Read
// conv/fp16x2.cuh first.
#pragma once
#ifndef ROW_BYTES
#define ROW_BYTES 64
#define BLOCK_ROWS 64
#define PACK_BLOCKS 6
#define MAX_PARTS 32
#define MAX_OVERRUN 320
#endif
#include "conv/fp16x2.cuh"

// A packed row: OF_LINE channels of a position, of one part, 64 bytes whose words are swizzled.
constexpr int LINE = ROW_BYTES, WORDS = LINE / CHUNK_BYTES, OF_LINE = LINE / 2;
constexpr int LAID = BLOCK_ROWS, LAYING = LAID * WORDS; // rows that a block packs at a time, and its threads: one a word
constexpr int LAYING_BLOCKS = PACK_BLOCKS;              // blocks of a multiprocessor that there must be registers for
constexpr int FRONT = (BEFORE + 7) / 8 * 8;     // rows before position 0, so that the first windows are inside
constexpr int BEYOND = MAX_OVERRUN + REACH;             // rows behind the last image that a stage may read
constexpr int PART = 1 << 13, MOST_PARTS = MAX_PARTS;  // elements of a part of an image, which a block measures; parts, at most
static_assert(LAYING == MEASURING && MOST_PARTS <= WARP, "one block size; a warp joins the parts of an image");

__device__ __forceinline__ int exchanged_word(int line, int word) { return word ^ line / 2 % WORDS; }

__device__ __forceinline__ char *aligned_to_lines(const void *at) { return (char *)(((uintptr_t)at + 1023) / 1024 * 1024); }

// Parts of an image.
template <class Array>
constexpr int PARTS = parts(Array::SIZE, PART) < MOST_PARTS ? parts(Array::SIZE, PART) : MOST_PARTS;

// Packed images in scratch. For each part of a number and each chunk of channels the rows of all positions, position 0
// behind `front`; zeros where no image has an element.
struct Laid {
    Known *known;    // of each image
    Measured *seen;  // of each part of an image, MOST_PARTS an image
    int *small;      // of each image, how many elements are small
    int batch, count, chunks, front; // count: rows of a part and a chunk, a multiple of LAID
    char *lines;
    float *squares; // of each row the sum of its scaled elements' squares, where there are two parts

    __device__ Laid(char *memory, int batch, int channels, int front)
        : known((Known *)memory), seen((Measured *)(known + batch)), small((int *)(seen + (int64_t)batch * MOST_PARTS)),
          batch(batch), count(parts(batch * IMAGE + front + BEYOND, LAID) * LAID), chunks(parts(channels, OF_LINE)),
          front(front), lines(aligned_to_lines(small + batch)), squares((float *)at(NUMBERS, 0, 0)) {}
    __device__ __forceinline__ char *at(int number, int chunk, int line) const {
        return lines + ((int64_t)(number * chunks + chunk) * count + line) * LINE;
    }
    __device__ __forceinline__ char *end() const { return (char *)(squares + (int64_t)chunks * count); }

    // Measures all images, by all blocks of a launch.
    template <class Array> __device__ __forceinline__ void measure(const Array &images) const {
        for (int i = blockIdx.x; i < batch * PARTS<Array>; i += gridDim.x) {
            const int image = i / PARTS<Array>, part = i % PARTS<Array>;
            const Measured found = measured_part<Array>(images.x + (int64_t)image * Array::SIZE, part);
            if (threadIdx.x == 0) {
                seen[(int64_t)image * MOST_PARTS + part] = found;
                if (part == 0) small[image] = 0;
            }
            __syncthreads();
        }
    }

    // Then packs them. From the end, as the second cache has what was measured last.
    template <class Array> __device__ __forceinline__ void lay(const Array &images) const {
        for (int i = count / LAID * chunks - 1 - blockIdx.x; i >= 0; i -= gridDim.x) {
            lay(images, i);
            __syncthreads();
        }
    }

  private:
    // By a warp: the statistics of an image.
    template <class Array> __device__ __forceinline__ Measured measured(int image) const {
        const int lane = threadIdx.x % WARP;
        Measured found;
        if (lane < PARTS<Array>) found = seen[(int64_t)image * MOST_PARTS + lane];
        found.join_warp();
        return found;
    }

    // LAID lines of a chunk; what is not held becomes zero.
    template <class Array> __device__ __forceinline__ void lay(const Array &images, int piece) const {
        __shared__ Chunk words[NUMBERS][LAID * WORDS];
        __shared__ float of_words[WORDS][LAID];
        __shared__ struct {
            float up;
            bool small; // whether it has small elements
        } scales[LAID]; // of the images that lie there
        const int from = piece / chunks * LAID, chunk = piece % chunks;
        const int line = threadIdx.x % LAID, word = threadIdx.x / LAID, channel = chunk * OF_LINE + word * CHUNK_ELEMENTS;
        const int position = from + line - front, place = images.at(position);
        float x[CHUNK_ELEMENTS];
        #pragma unroll
        for (int j = 0; j < CHUNK_ELEMENTS; j++) {
            const int further = (channel + j) * Array::AREA;
            x[j] = place >= 0 && further < Array::SIZE ? images.x[place + further] : 0;
        }
        const int first = max(from - front, 0) / IMAGE, end = min((from + LAID - 1 - front) / IMAGE + 1, batch);
        for (int image = first + threadIdx.x / WARP; image < end; image += LAYING / WARP) {
            const bool begins = chunk == 0 && image * IMAGE >= from - front;
            const Measured seen = measured<Array>(image);
            if (threadIdx.x % WARP > 0) continue;
            const float up = seen.up(TINY);
            scales[image - first] = {up, seen.least * up < NORMAL};
            if (begins) known[image] = seen.known(TINY, Array::SIZE);
        }
        __syncthreads();
        const int image = position / IMAGE;
        const float up = place >= 0 ? scales[image - first].up : 0;
        #pragma unroll
        for (int j = 0; j < CHUNK_ELEMENTS; j++) x[j] = up != 0 ? x[j] : 0; // infinity, too
        if (up != 0 && scales[image - first].small) count_small(image, x, up);
        Chunk halves[NUMBERS];
        of_words[word][line] = halve(halves, x, up);
        #pragma unroll
        for (int i = 0; i < NUMBERS; i++) words[i][line * WORDS + exchanged_word(line, word)] = halves[i];
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < NUMBERS; i++) ((Chunk *)at(i, chunk, from))[threadIdx.x] = words[i][threadIdx.x];
        if (NUMBERS == 1 || word > 0) return;
        float sum = 0;
        #pragma unroll
        for (int i = 0; i < WORDS; i++) sum += of_words[i][line];
        squares[(int64_t)chunk * count + from + line] = sum;
    }

    __device__ __forceinline__ void count_small(int image, const float (&x)[CHUNK_ELEMENTS], float up) const {
        int count = 0;
        #pragma unroll
        for (float each : x) count += each != 0 && fabsf(each) * up < NORMAL;
        if (count > 0) atomicAdd(&small[image], count);
    }

    template <class Array> static __device__ __forceinline__ Measured measured_part(const T *image, int part) {
        constexpr int COUNT = Array::SIZE, WIDE = COUNT % 4 == 0 ? 4 : COUNT % 2 == 0 ? 2 : 1;
        constexpr int64_t VECTORS = COUNT / WIDE;
        constexpr int AT_ONCE = 4; // reads that are under way
        const int end = VECTORS * (part + 1) / PARTS<Array>;
        Measured seen;
        for (int first = VECTORS * part / PARTS<Array> + threadIdx.x; first < end; first += AT_ONCE * MEASURING) {
            Vector<T, WIDE> vectors[AT_ONCE];
            #pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int at = first + i * MEASURING;
                vectors[i] = at < end ? load<T, WIDE>(image + at * WIDE) : Vector<T, WIDE>{};
            }
            #pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                #pragma unroll
                for (int j = 0; j < WIDE; j++) seen.see(vectors[i].lane[j]);
            }
        }
        seen.join_block();
        return seen;
    }
};
