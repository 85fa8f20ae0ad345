// The scheduler. Compiled without ThreadSanitizer's instrumentation, so that it sees only what the
// kernels do and the order that is declared to it here. It does see allocations: a fiber makes
// none.
#include "cuda_emulation.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef MTP_TSAN
#include <sanitizer/tsan_interface.h>
#endif

namespace cuda_emulation {

Traffic traffic{};
void count(uint64_t read, uint64_t written) {
  traffic.read += read;
  traffic.written += written;
}

namespace {

constexpr size_t kStack = 256 << 10, kGuard = 4096;
constexpr unsigned kMostThreads = 1024;

// Happens-before, for ThreadSanitizer. A fiber that leaves the barrier late must not learn what the
// others did since: rounds of a barrier alternate between two of these.
struct Order {
  char sync[2];
#ifdef MTP_TSAN
  void release(unsigned round) { __tsan_release(&sync[round % 2]); }
  void acquire(unsigned round) { __tsan_acquire(&sync[round % 2]); }
#else
  void release(unsigned) {}
  void acquire(unsigned) {}
#endif
};

enum class State { ready, in_block_barrier, in_warp_function, exited };

// Of threads at a barrier, or of lanes in a warp function. None can come a second time before all
// have come once.
struct Meeting {
  unsigned mask = 0;  // of lanes
  unsigned arrived = 0;
  unsigned round = 0;
  Order order{};
  int predicates = 0;
  Votes votes{};  // of the last round, like published
  uint64_t words[32]{}, published[32]{};
};

struct Fiber {
  Self self;
  unsigned index;
  State state;
  Site site;
  Meeting* meeting = nullptr;
  ucontext_t context;
  void* tsan = nullptr;
};

constexpr unsigned kMostMasks = 8;  // that the warp functions of one warp use in a launch

struct Block {
  std::vector<Fiber> fibers;
  Meeting barrier;
  std::vector<std::array<Meeting, kMostMasks>> warps;
  Order start{}, finish{};
  const char* failure = nullptr;  // of the current fiber
  std::unique_ptr<char[]> dynamic;
  void (*body)(void*);
  void* argument;
  ucontext_t scheduler;
  void* scheduler_tsan = nullptr;
};

Block* block = nullptr;
Fiber* current = nullptr;
std::mt19937_64 random_order(0);

void switch_tsan([[maybe_unused]] void* fiber) {
#ifdef MTP_TSAN
  __tsan_switch_to_fiber(fiber, __tsan_switch_to_fiber_no_sync);
#endif
}

// Made once: that takes longer than to run most kernels.
void* tsan_fiber([[maybe_unused]] unsigned index) {
#ifdef MTP_TSAN
  static std::vector<void*> fibers;
  while (fibers.size() <= index) fibers.push_back(__tsan_create_fiber(0));
  return fibers[index];
#else
  return nullptr;
#endif
}

void to_scheduler() {
  Fiber& fiber = *current;
  block->finish.release(0);  // it may not be resumed
  switch_tsan(block->scheduler_tsan);
  swapcontext(&fiber.context, &block->scheduler);
}

void fiber_main() {
  block->start.acquire(0);
  block->body(block->argument);
  current->state = State::exited;
  to_scheduler();
}

char* stack_of(unsigned index) {
  static char* const stacks = [] {
    void* memory = mmap(nullptr, kMostThreads * kStack, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("no memory for the stacks of fibers");
    for (unsigned i = 0; i < kMostThreads; ++i)
      mprotect(static_cast<char*>(memory) + i * kStack, kGuard, PROT_NONE);
    return static_cast<char*>(memory);
  }();
  return stacks + index * kStack;
}

std::string place(const Site& site) {
  const std::string file = site.file_name();
  return file.substr(file.rfind('/') + 1) + ":" + std::to_string(site.line());
}

std::string name_of(const dim3& at) {
  return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) +
         ")";
}

std::string ranges(const std::vector<unsigned>& threads) {
  std::string text;
  for (size_t i = 0; i < threads.size(); ++i) {
    const size_t first = i;
    while (i + 1 < threads.size() && threads[i + 1] == threads[i] + 1) ++i;
    text += (first ? ", " : "") + std::to_string(threads[first]);
    if (i > first) text += "-" + std::to_string(threads[i]);
  }
  return text;
}

// What each thread of the block is doing, the same of several once.
std::string whereabouts() {
  std::map<std::string, std::vector<unsigned>> groups;
  for (const Fiber& fiber : block->fibers) {
    const char* how = fiber.state == State::in_warp_function ? "wait in a warp function at "
                                                             : "wait in a barrier at ";
    groups[fiber.state == State::exited ? "have exited" : how + place(fiber.site)].push_back(
        fiber.index);
  }
  std::string text;
  for (const auto& [what, threads] : groups)
    text += (text.empty() ? "threads " : "; threads ") + ranges(threads) + " " + what;
  return text;
}

constexpr const char* kDivergent = "divergent barrier";

[[noreturn]] void report(const std::string& what) {
  block->finish.acquire(0);
  throw std::runtime_error("block " + name_of(block->fibers[0].self.block) + ": " + what);
}

void report_failure() {
  if (block->failure == kDivergent) report(kDivergent + (": " + whereabouts()));
  report("thread " + std::to_string(current->index) + " " + block->failure + " at " +
         place(current->site));
}

// Returns when all have come. publish() runs once, in the last of them.
template <typename Publish>
void meet(Meeting& meeting, unsigned expected, State state, const Site& site, Publish publish) {
  const unsigned round = meeting.round;
  current->state = state;
  current->site = site;
  current->meeting = &meeting;
  meeting.order.release(round);
  if (++meeting.arrived < expected) {
    to_scheduler();
    return meeting.order.acquire(round);
  }
  for (Fiber& fiber : block->fibers) {
    if (fiber.meeting != &meeting) continue;
    if (fiber.site.line() != site.line() || std::strcmp(fiber.site.file_name(), site.file_name()))
      fail(kDivergent, site);
    fiber.state = State::ready;
  }
  for (Fiber& fiber : block->fibers)
    if (fiber.meeting == &meeting) fiber.meeting = nullptr;
  meeting.order.acquire(round);
  publish();
  meeting.order.release(round);
  meeting.arrived = 0;
  ++meeting.round;
}

void start(Fiber& fiber, unsigned index, const Self& self) {
  fiber.self = self;
  fiber.index = index;
  fiber.state = State::ready;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack_of(index) + kGuard;
  fiber.context.uc_stack.ss_size = kStack - kGuard;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, fiber_main, 0);
  fiber.tsan = tsan_fiber(index);
}

void run_block(const dim3& at, const dim3& grid, const dim3& size) {
  const unsigned threads = size.x * size.y * size.z;
  block->fibers.resize(threads);
  block->warps.assign((threads + 31) / 32, {});
  block->barrier = {};
  for (unsigned i = 0; i < threads; ++i) {
    const dim3 thread{i % size.x, i / size.x % size.y, i / size.x / size.y};
    start(block->fibers[i], i, {thread, at, size, grid});
  }
  block->start.release(0);
  std::vector<unsigned> ready(threads);
  std::iota(ready.begin(), ready.end(), 0u);
  while (!ready.empty()) {
    std::shuffle(ready.begin(), ready.end(), random_order);
    for (unsigned i : ready) {
      current = &block->fibers[i];
      switch_tsan(current->tsan);
      swapcontext(&block->scheduler, &current->context);
      if (block->failure) report_failure();
    }
    ready.clear();
    for (const Fiber& fiber : block->fibers)
      if (fiber.state == State::ready) ready.push_back(fiber.index);
  }
  for (const Fiber& fiber : block->fibers)
    if (fiber.state != State::exited) report("deadlock: " + whereabouts());
  // Blocks are ordered: the next one's shared arrays lie where this one's did.
  block->finish.acquire(0);
}

}  // namespace

const Self& self() { return current->self; }
void* dynamic_shared() { return block->dynamic.get(); }
unsigned lane() { return current->index % 32; }
void set_seed(uint64_t seed) { random_order.seed(seed); }

void fail(const char* what, const Site& site) {
  block->failure = what;
  current->site = site;
  to_scheduler();
  __builtin_unreachable();  // a fiber that has failed is not resumed
}

Votes block_barrier(bool predicate, const Site& site) {
  Meeting& barrier = block->barrier;
  const auto threads = static_cast<unsigned>(block->fibers.size());
  barrier.predicates += predicate;
  meet(barrier, threads, State::in_block_barrier, site, [&] {
    barrier.votes = {barrier.predicates, static_cast<int>(threads)};
    barrier.predicates = 0;
  });
  return barrier.votes;
}

const uint64_t* warp_exchange(unsigned mask, uint64_t word, const Site& site) {
  if (!(mask >> lane() & 1)) fail("is not in the mask of its warp function", site);
  auto& meetings = block->warps[current->index / 32];
  Meeting* meeting = meetings.begin();
  while (meeting != meetings.end() && meeting->mask != mask && meeting->mask) ++meeting;
  if (meeting == meetings.end()) fail("uses one mask more than the emulation provides for", site);
  meeting->mask = mask;
  meeting->words[lane()] = word;
  const unsigned first = current->index / 32 * 32;
  const auto lanes = std::min<unsigned>(32, static_cast<unsigned>(block->fibers.size()) - first);
  const unsigned there = lanes == 32 ? mask : mask & ((1u << lanes) - 1);
  meet(
      *meeting, static_cast<unsigned>(__builtin_popcount(there)), State::in_warp_function, site,
      [&] { std::copy(std::begin(meeting->words), std::end(meeting->words), meeting->published); });
  return meeting->published;
}

void run(dim3 grid, dim3 size, size_t dynamic_bytes, void (*body)(void*), void* argument) {
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  const uint64_t threads = uint64_t{size.x} * size.y * size.z;
  if (blocks == 0 || threads == 0 || threads > kMostThreads || grid.y > 65535 || grid.z > 65535)
    throw std::runtime_error("invalid launch of " + name_of(grid) + " blocks of " + name_of(size) +
                             " threads");
  Block launched{};
  launched.body = body;
  launched.argument = argument;
  block = &launched;
#ifdef MTP_TSAN
  launched.scheduler_tsan = __tsan_get_current_fiber();
#endif
  std::vector<uint64_t> order(blocks);
  std::iota(order.begin(), order.end(), uint64_t{0});
  std::shuffle(order.begin(), order.end(), random_order);
  for (uint64_t i : order) {
    launched.dynamic.reset(new char[dynamic_bytes]);
    run_block({static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
               static_cast<unsigned>(i / grid.x / grid.y)},
              grid, size);
  }
}

}  // namespace cuda_emulation
