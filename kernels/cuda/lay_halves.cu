// Lays images out in halves for conv_halves.cu: a block takes LAID lines of a chunk of channels, a thread a word of a line.
// Read halves.cuh first.
#include "halves.cuh"

KERNEL __launch_bounds__(LAID *WORDS) lay_halves(
    const T *x, const T *w, const Epilogue epilogue, int64_t batch, char *scratch) {
    wait_for_inputs();
    const Inputs images = {x, (int)batch};
    const Made made(scratch, batch);
    const Lines lines(made, batch);
    __shared__ Word words[2][LAID][WORDS];
    __shared__ float squares[WORDS][LAID];
    // What was measured last is read first, as much of it is in the second cache; what is multiplied first comes last.
    const int first = (gridDim.x - 1 - blockIdx.x) * LAID, chunk = blockIdx.y;
    const int line = threadIdx.x % LAID, word = threadIdx.x / LAID;
    const int position = first + line - FRONT, place = images.at(position), channel = chunk * CHANNELS + word * GROUP_OF;
    float found[GROUP_OF];
    #pragma unroll
    for (int j = 0; j < GROUP_OF; j++) {
        const bool inside = place >= 0 && channel + j < IN_CHANNELS;
        found[j] = inside ? x[place + (channel + j) * Inputs::AREA] : 0;
    }
    Word halves[2];
    squares[word][line] = halve(halves, found, place >= 0 ? made.images[position / IMAGE].up : 0);
    #pragma unroll
    for (int i = 0; i < 2; i++) words[i][line][exchanged_word(line, word)] = halves[i];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 2; i++) ((Word *)lines.at(i, chunk, first))[threadIdx.x] = (&words[i][0][0])[threadIdx.x];
    if (word > 0) return;
    float sum = 0;
    #pragma unroll
    for (int i = 0; i < WORDS; i++) sum += squares[i][line];
    lines.squares[chunk * lines.count + first + line] = sum;
}
