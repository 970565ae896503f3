// Opened entries of one KV head: a cache-sized chunk of keys and values as matmul operands, with factors kept apart.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "layout.h"
#include "pack.h"

namespace csa2 {

constexpr int kChunkEntries = 512;
constexpr int kBlockEntries = 128;  // entries per softmax step
constexpr int kEntryPad = 32;       // a chunk is padded to it with entries of weight zero

// Grows only; contents are undefined after `get`.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  template <class T>
  T* get(size_t count) {
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    if (bytes > size_) {
      std::free(data_);
      data_ = std::aligned_alloc(64, bytes);
      if (!data_) throw std::bad_alloc();
      size_ = bytes;
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

// logit_e = (row . key_e) * kmul_e + row . kmean(page) * scale + kadd_e, all in units of log2;
// output = sum_e p_e vmul_e value_e + (sum of p over the page) vmean(page).
struct Chunk {
  Line* keys;
  Line* values;
  float *kmul, *kadd, *vmul, *kmean, *vmean;
  int entries = 0;       // multiple of kEntryPad
  int page_entries = 0;  // multiple of 16: the segments that share a mean
  int key_steps = 0;     // lines of a block of 16 entries
  int64_t value_stride = 0;
  bool coded = false;        // kmean and vmul are meaningful
  bool value_means = false;  // vmean is, too

  template <class Step>
  void allocate(Scratch& scratch, int max_dim, int head_dim) {
    const int blocks = kChunkEntries / kLanes, pad = round_up(head_dim, kLanes);
    value_stride = kChunkEntries / Step::kPer;
    const size_t key_lines = static_cast<size_t>(blocks) * csa2::key_steps<Step>(max_dim);
    const size_t value_lines = static_cast<size_t>(value_stride) * (pad / kLanes);
    const size_t means = static_cast<size_t>(blocks) * pad / kLanes;
    const size_t factors = 3 * kChunkEntries / kLanes;
    keys = scratch.get<Line>(key_lines + value_lines + factors + 2 * means);
    values = keys + key_lines;
    kmul = reinterpret_cast<float*>(values + value_lines);
    kadd = kmul + kChunkEntries;
    vmul = kadd + kChunkEntries;
    kmean = vmul + kChunkEntries;
    vmean = kmean + blocks * pad;
  }

  // Pads from `used` (a multiple of 16) to a multiple of kEntryPad: weight zero, and nothing that could be NaN.
  template <class Step>
  void finish(int used, int value_blocks) {
    entries = round_up(used, kEntryPad);
    if (coded && entries > used) {  // then pages have 16 entries, and the padding is one page more
      std::memset(kmean + used / kLanes * value_blocks * kLanes, 0, sizeof(float) * value_blocks * kLanes);
      std::memset(vmean + used / kLanes * value_blocks * kLanes, 0, sizeof(float) * value_blocks * kLanes);
    }
    for (int e = used; e < entries; e += kLanes) {
      std::memset(keys + static_cast<int64_t>(e / kLanes) * key_steps, 0, sizeof(Line) * key_steps);
      for (int b = 0; b < value_blocks; ++b)
        std::memset(values + b * value_stride + e / Step::kPer, 0, sizeof(Line) * kLanes / Step::kPer);
      for (int i = e; i < e + kLanes; ++i) {
        kmul[i] = vmul[i] = 0.0f;
        kadd[i] = -__builtin_inff();
      }
    }
  }
};

}  // namespace csa2
