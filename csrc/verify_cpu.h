// The stages of verify on CPU, compiled once per instruction set (verify_cpu_kernels.cpp).
//
// Requests are decided in waves: wave i reads row i of the requests whose drafts before i were all
// accepted, so that a row after a rejection is never read. A wave has two parallel stages: `scan`
// goes over blocks of the vocabulary, `judge` over requests. Ranges may be split over threads in
// any way: what a block or a request computes does not depend on the split.
#pragma once

#include "verify.h"

namespace mtp {

constexpr int64_t kChunk = 64;  // lanes of a maximum that the filters use to skip lanes

struct Block {
  float highest;   // finite logit, -inf without one
  bool is_finite;  // no NaN and no +inf; of probabilities: no negative one either
  int64_t weight;  // sum of the lanes' weights, in units of 2^-40 of the heaviest lane
  float scale;     // the heaviest lane relative to the row's
  int64_t mass;    // the weight in the row's unit
  float best;      // coupled: the highest score of the race, relative to the scale
  int32_t winner;  // and its lane
};

// What the scan computes beside highest logits: nothing for a greedy request.
enum class Need { nothing, weights, race };

// The distribution of a row's token, or of a draft's.
struct Law {
  const void* logits;  // [V]; of a draft given as probabilities: those
  DType dtype;
  int64_t request;
  int64_t index;  // of the row in its request
  bool is_penalised;
  bool is_edited;  // by penalties, bias or mask
  bool is_greedy;
  bool is_probs;
  Need need;
  float scale;    // of logits: log2(e) / temperature
  float* chunks;  // [ceil(V / kChunk)] maxima, nullptr without filters; of this wave only
  Block* blocks;  // [ceil(V / kBlock)]

  // Known after the scan:
  int32_t status;
  float highest;
  float cut;      // lowest logit kept, finite
  int64_t total;  // mass
  int64_t point;  // the only token there is, -1 for several
};

// What the waves know of a request.
struct Progress {
  bool is_done;
  int64_t accepted;         // the next three: method block
  double kept, kept_there;  // now, and at the accepted row
};

struct VerifyWorkspace {
  int64_t blocks;  // of a row
  int64_t chunks;  // of a row

  Progress* progress;        // [B]
  Law* targets;              // [R]
  Block* target_blocks;      // [R, blocks]
  Law* drafts;               // [B, K], with draft logits
  Block* draft_blocks;       // [B, K, blocks]
  float* chunk_maxima;       // [B, 2, chunks], with filters: of the wave's targets and drafts
  int64_t* residual_masses;  // [B, blocks]

  int64_t* active;  // [B] requests of the wave
  int64_t num_active;
  Law** laws;  // [2 B] to be scanned in the wave
  int64_t num_laws;
};

struct VerifyCpuKernels {
  // Lists the requests and laws of wave i.
  void (*plan)(const VerifyParams& p, VerifyWorkspace& w, int64_t i);
  // Blocks [begin, end) of the wave's laws, counted through.
  void (*scan)(const VerifyParams& p, const VerifyWorkspace& w, int64_t begin, int64_t end);
  // Requests [begin, end) of the wave: accepts draft i, or writes the request's outputs.
  void (*judge)(const VerifyParams& p, const VerifyWorkspace& w, int64_t i, int64_t begin,
                int64_t end);
  // For the tests: words[4] of csrc/exact.h, and its functions on the bits of n floats or words.
  void (*philox)(uint64_t seed, uint64_t position, uint32_t purpose, uint32_t lane,
                 uint32_t* words);
  void (*exp2)(const uint32_t* from, int64_t n, uint32_t* to);
  void (*log)(const uint32_t* from, int64_t n, uint32_t* to);
  void (*exponential)(const uint32_t* from, int64_t n, uint32_t* to);
};

// Of the instruction set in use.
const VerifyCpuKernels& verify_cpu_kernels();

extern const VerifyCpuKernels verify_cpu_scalar;
#if defined(__x86_64__)
extern const VerifyCpuKernels verify_cpu_avx2;
extern const VerifyCpuKernels verify_cpu_avx512;
extern const VerifyCpuKernels verify_cpu_avx512_bf16;
#endif

}  // namespace mtp
