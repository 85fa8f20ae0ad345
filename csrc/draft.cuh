// Device code that draft_pack and draft_step share.
#pragma once

#include "draft.h"

namespace mtp {

constexpr int kDraftThreads = 128;
constexpr int kAhead = 4;  // loads that a thread has in flight

// Whether none of count values is below the one before it; for a whole block.
__device__ inline bool block_ascends(const Ints& starts, int64_t count) {
  bool descends = false;
#pragma unroll 1  // seldom more than one round
  for (int64_t i = threadIdx.x + 1; i < count; i += kDraftThreads)
    descends |= starts.at(i) < starts.at(i - 1);
  return !__syncthreads_or(descends);
}

template <typename Word>
__device__ inline void copy_words(char* to, const char* from, int64_t bytes) {
  const int64_t words = bytes / static_cast<int64_t>(sizeof(Word));
  for (int64_t start = threadIdx.x; start < words; start += kAhead * kDraftThreads) {
    Word word[kAhead] = {};
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t i = start + j * kDraftThreads;
      if (from && i < words) word[j] = __ldg(reinterpret_cast<const Word*>(from) + i);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t i = start + j * kDraftThreads;
      if (i < words) __stwb(reinterpret_cast<Word*>(to) + i, word[j]);
    }
  }
}

// A hidden state, by a whole block; zeros without a source, which nobody writes in this launch.
__device__ inline void copy_row(char* to, const char* from, int64_t bytes) {
  const uint64_t alignment = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) |
                             static_cast<uint64_t>(bytes);
  if (alignment % sizeof(int4) == 0)
    copy_words<int4>(to, from, bytes);
  else if (alignment % sizeof(int) == 0)
    copy_words<int>(to, from, bytes);
  else
    copy_words<char>(to, from, bytes);
}

}  // namespace mtp
