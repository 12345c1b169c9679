// Host C++: lanes are fibres that take turns in a fixed order, so that a run is deterministic and a mistake is found:
// lanes that part ways at a shuffle or barrier, unaligned loads, shared memory that is read before it is written.
#ifdef __APPLE__
#define _XOPEN_SOURCE 700  // macOS hides ucontext otherwise
#endif
#include <setjmp.h>  // and no math.h: in C++ it makes three quarters of the time a body takes to compile
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define HELPER inline
#define UNROLL
#define DEVICE_IN(T) const T*
#define DEVICE_OUT(T) T*
#define LANE_ARRAY(T) T*
#define SHARED(type, name, count)                         \
  alignas(16) static type name[count];                    \
  {                                                       \
    static long poisoned = 0;                             \
    if (poisoned != serial) poison(name, sizeof(name));   \
    poisoned = serial;                                    \
  }
#define BARRIER() pause(BARRIER_STOP, __LINE__)
#define SCALAR(name) name[0]
#define SIMD_SHUFFLE(x, lane) exchange(x, lane, __LINE__)
#define SIMD_SHUFFLE_XOR(x, mask) exchange(x, current ^ (mask), __LINE__)

// Multiplications and additions that no compiler may fuse or split: the same rounding in every build.
#define MUL(x, y) ((x) * (y))
#define FMA(x, y, z) __builtin_fmaf(x, y, z)
#define INF __builtin_inff()
#define EXP(x) __builtin_expf(x)
#define LOG(x) __builtin_logf(x)
#define LOG1P(x) __builtin_log1pf(x)
#define SQRT(x) __builtin_sqrtf(x)
#define RSQRT(x) (1.0f / __builtin_sqrtf(x))
#define SIN(x) __builtin_sinf(x)
#define COS(x) __builtin_cosf(x)
#define FLOAT_OF_BITS(x) float_of(x)

// --- fibres

constexpr int LANES = 1024;            // the most threads of a threadgroup on either GPU
constexpr size_t STACK = 128 << 10;    // bytes a lane; assumed: ten times what a body with its arrays takes
constexpr size_t SHARED_MOST = 48 << 10;  // CUDA's static limit (Metal's is 32 KiB)

enum Stop { RUNNING, SIMD_STOP, BARRIER_STOP, ENDED };
struct Fibre {
  ucontext_t start;
  sigjmp_buf resume;
  Stop stop;
  int line;       // where it stopped
  unsigned turn;  // exchanges so far
  bool started;
};

static void body();
static void** arrays;
static int group[3];
static int threads, current;
static long serial;        // counts threadgroups
static size_t shared_bytes;
static Fibre fibres[LANES];
static uint64_t slots[2][LANES];  // of two sides, so that a lane may write its next value while others read the last
static sigjmp_buf scheduler, leave;
static char fault[200];

[[noreturn]] static void fail() { siglongjmp(leave, 1); }

__attribute__((noinline)) static void pause(Stop stop, int line) {
  fibres[current].stop = stop;
  fibres[current].line = line;
  if (!sigsetjmp(fibres[current].resume, 0)) siglongjmp(scheduler, 1);
}

static void enter() {
  body();
  fibres[current].stop = ENDED;
  siglongjmp(scheduler, 1);
}

__attribute__((noinline)) static void run_lane(int lane) {
  current = lane;
  if (sigsetjmp(scheduler, 0)) return;
  if (fibres[lane].started) siglongjmp(fibres[lane].resume, 1);
  fibres[lane].started = true;
  setcontext(&fibres[lane].start);
}

static void expect_together(int one, int other) {
  const char* names[] = {"", "a shuffle", "a barrier", "its end"};
  const Fibre &a = fibres[one], &b = fibres[other];
  if (a.stop == b.stop && (a.stop == ENDED || a.line == b.line)) return;
  snprintf(fault, sizeof(fault), "lanes part ways: lane %d is at %s (line %d), lane %d at %s (line %d)", one,
           names[a.stop], a.line, other, names[b.stop], b.line);
  fail();
}

// Runs every lane to its next stop. Simdgroups at a shuffle go on at once, from a barrier all of them together.
static bool run_pass() {
  for (int lane = 0; lane < threads; ++lane)
    if (fibres[lane].stop == RUNNING) run_lane(lane);
  bool shuffling = false;
  for (int lane = 0; lane < threads; ++lane) {
    expect_together(lane & ~31, lane);
    shuffling |= fibres[lane].stop == SIMD_STOP;
  }
  for (int lane = 1; lane < threads && !shuffling; ++lane) expect_together(0, lane);
  if (fibres[0].stop == ENDED && !shuffling) return false;
  for (int lane = 0; lane < threads; ++lane)
    if (fibres[lane].stop == (shuffling ? SIMD_STOP : BARRIER_STOP)) fibres[lane].stop = RUNNING;
  return true;
}

static void run_group(char* stacks) {
  ++serial;
  shared_bytes = 0;
  for (int lane = 0; lane < threads; ++lane) {
    Fibre& fibre = fibres[lane];
    getcontext(&fibre.start);
    fibre.start.uc_stack.ss_sp = stacks + lane * STACK;
    fibre.start.uc_stack.ss_size = STACK;
    fibre.start.uc_link = nullptr;
    makecontext(&fibre.start, enter, 0);
    fibre.stop = RUNNING;
    fibre.turn = 0;
    fibre.started = false;
  }
  while (run_pass()) {
  }
}

// Runs the grid. Returns an empty text, or what was wrong.
extern "C" __attribute__((visibility("default"))) const char* run(void** arguments, const int* grid, int count) {
  arrays = arguments;
  threads = count;
  fault[0] = 0;
  char* stacks = (char*)malloc(count * STACK);
  if (!sigsetjmp(leave, 0)) {
    for (group[2] = 0; group[2] < grid[2]; ++group[2])
      for (group[1] = 0; group[1] < grid[1]; ++group[1])
        for (group[0] = 0; group[0] < grid[0]; ++group[0]) run_group(stacks);
  }
  free(stacks);
  return fault;
}

// --- what the macros need

static void poison(void* cells, size_t bytes) {
  memset(cells, 0xff, bytes);
  shared_bytes += bytes;
  if (shared_bytes <= SHARED_MOST) return;
  snprintf(fault, sizeof(fault), "%zu bytes of shared memory; at most %zu", shared_bytes, SHARED_MOST);
  fail();
}

template <typename T> T exchange(T value, int lane, int line) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "shuffles carry at most eight bytes");
  uint64_t* side = slots[fibres[current].turn++ & 1];
  memcpy(&side[current], &value, sizeof(T));
  pause(SIMD_STOP, line);
  memcpy(&value, &side[(current & ~31) | (lane & 31)], sizeof(T));
  return value;
}

struct bfloat16 { uint16_t bits; };
struct float16 { uint16_t bits; };

inline unsigned bits_of(float x) {
  unsigned bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline float float_of(unsigned bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

template <typename T> float from_bits(unsigned bits);
template <> inline float from_bits<bfloat16>(unsigned bits) { return float_of(bits << 16); }
template <> inline float from_bits<float16>(unsigned bits) {
  float magnitude = (bits & 0x7c00) == 0x7c00 ? float_of(0x7f800000 | (bits & 0x3ff) << 13)
                                              : __builtin_ldexpf(float_of((bits & 0x7fff) << 13), 112);
  return bits & 0x8000 ? -magnitude : magnitude;
}

template <typename T> unsigned to_bits(float x);
template <> inline unsigned to_bits<bfloat16>(float x) {
  unsigned bits = bits_of(x);
  return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
template <> inline unsigned to_bits<float16>(float x) {
  unsigned sign = bits_of(x) >> 16 & 0x8000;
  float magnitude = __builtin_fabsf(x);
  if (x != x) return sign | 0x7e00;
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  // below 2^-14 the spacing is fixed at 2^-24: adding 1/2 leaves the rounded count of them in the low bits
  if (magnitude < 6.103515625e-05f) return sign | (bits_of(magnitude + 0.5f) - bits_of(0.5f));
  unsigned bits = bits_of(magnitude) - (112u << 23);
  return sign | (bits + 0xfff + (bits >> 13 & 1)) >> 13;
}

inline float to_float(bfloat16 x) { return from_bits<bfloat16>(x.bits); }
inline float to_float(float16 x) { return from_bits<float16>(x.bits); }
template <typename T> float to_float(T x) { return float(x); }
template <typename T> T from_float(float x) { return T(x); }
template <> inline bfloat16 from_float<bfloat16>(float x) { return {uint16_t(to_bits<bfloat16>(x))}; }
template <> inline float16 from_float<float16>(float x) { return {uint16_t(to_bits<float16>(x))}; }

struct Words { unsigned w[4]; };
template <int BYTES, typename T> Words load(const T* p) {
  if (uintptr_t(p) % BYTES) {
    snprintf(fault, sizeof(fault), "LOAD%d of an address that is %d past a multiple of %d", BYTES,
             int(uintptr_t(p) % BYTES), BYTES);
    fail();
  }
  Words words = {};
  memcpy(&words, p, BYTES);
  return words;
}
template <typename T> Words load16(const T* p) { return load<16>(p); }
template <typename T> Words load16_once(const T* p) { return load<16>(p); }
template <typename T> Words load8_once(const T* p) { return load<8>(p); }
