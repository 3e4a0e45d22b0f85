// Copies of many tensors into mapped memory of the host by one kernel (ckptd/cuda/store_kernel.py).
//
// store_kernel.ptx is what this becomes, for the driver to compile: `make kernel`.
//
// A block takes one tile after the other, as far apart as there are blocks. Loads are issued four at a time
// and before their stores, so that the latency of the device's memory is hidden by few blocks.

struct Tile {
    unsigned long long source;  // address on the device
    unsigned long long place;   // offset in the image
    unsigned long long bytes;
};

template <typename Word>
__device__ __forceinline__ unsigned long long copy_words(const Tile& tile, unsigned char* target) {
    const Word* __restrict__ from = reinterpret_cast<const Word*>(tile.source);
    Word* __restrict__ to = reinterpret_cast<Word*>(target);
    const unsigned int words = static_cast<unsigned int>(tile.bytes / sizeof(Word));
    const unsigned int step = blockDim.x;
    unsigned int i = threadIdx.x;
    for (; i + 3 * step < words; i += 4 * step) {
        const Word a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
        to[i] = a;
        to[i + step] = b;
        to[i + 2 * step] = c;
        to[i + 3 * step] = d;
    }
    for (; i < words; i += step) to[i] = from[i];
    return static_cast<unsigned long long>(words) * sizeof(Word);
}

extern "C" __global__ void ckptd_store(const Tile* tiles, unsigned int count, unsigned char* image) {
    for (unsigned int number = blockIdx.x; number < count; number += gridDim.x) {
        const Tile tile = tiles[number];
        unsigned char* target = image + tile.place;
        const unsigned long long aligned = tile.source | reinterpret_cast<unsigned long long>(target);
        unsigned long long done = 0;
        if ((aligned & 15) == 0) {
            done = copy_words<uint4>(tile, target);
        } else if ((aligned & 3) == 0) {
            done = copy_words<unsigned int>(tile, target);
        }
        const unsigned char* source = reinterpret_cast<const unsigned char*>(tile.source);
        for (unsigned long long i = done + threadIdx.x; i < tile.bytes; i += blockDim.x) target[i] = source[i];
    }
}
