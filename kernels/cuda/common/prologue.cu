// The prologue, which runs before a row of the registry reads activations. It applies the order and
// the factor of the weight. For tensor cores it converts to 16 bits or to INT8, with rows that
// begin on 16 bytes and zeros behind them.
#include <algorithm>

#include "kernels/base/math.h"
#include "kernels/cuda/common/integers.h"
#include "kernels/cuda/common/packed.cuh"
#include "kernels/cuda/common/prologue.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/steps.cuh"
#include "kernels/cuda/common/steps.h"
#include "kernels/cuda/core/launch.h"

// Kernels before a product let it begin at once: it brings its weights in meanwhile.
namespace awqd::cuda {
namespace {

constexpr int kThreads = 256;

// The bits of the largest finite magnitude of a run and `largest`.
__device__ __forceinline__ int LargestFiniteOfRun(const float (&v)[kIntegerRun], int largest) {
#pragma unroll
  for (int i = 0; i < kIntegerRun; ++i) {
    const int bits = __float_as_int(v[i]) & 0x7fffffff;
    largest = max(largest, bits < kInfinityBits ? bits : 0);
  }
  return largest;
}

// FP32 rows become FP16 times a power of two of their own, in `scale` (steps.cuh). Block = one row,
// a thread takes runs of 16. A row that has no more runs than the block has threads is read once.
// `stride` is a multiple of 8. `wide`: runs of x lie on 16 bytes.
__global__ __launch_bounds__(kMostRunThreads) void ConvertToFp16(Reader x, uint16_t* out,
                                                                 int64_t stride, float* scale,
                                                                 bool wide) {
  LaunchDependents();
  const int64_t row = blockIdx.x, step = int64_t{blockDim.x} * kIntegerRun;
  const int64_t mine = threadIdx.x * kIntegerRun;
  float v[kIntegerRun];
  int largest = 0;
  for (int64_t first = mine; first < x.k; first += step) {
    LoadRun(x, row, first, wide, v);
    largest = LargestFiniteOfRun(v, largest);
  }
  const int exponent = HalfExponent(__int_as_float(LargestOfBlock(largest)));
  const float down = ldexpf(1.0f, -exponent);
  for (int64_t first = mine; first < stride; first += step) {
    if (step < stride || first >= x.k) LoadRun(x, row, first, wide, v);
    uint32_t pairs[kIntegerRun / 2];
#pragma unroll
    for (int i = 0; i < kIntegerRun / 2; ++i) {
      pairs[i] = ToFp16x2(v[2 * i] * down, v[2 * i + 1] * down);
    }
    uint4* const to = reinterpret_cast<uint4*>(out + row * stride + first);
    to[0] = {pairs[0], pairs[1], pairs[2], pairs[3]};
    if (first + 8 < stride) to[1] = {pairs[4], pairs[5], pairs[6], pairs[7]};
  }
  if (threadIdx.x == 0) scale[row] = ldexpf(1.0f, exponent);
}

// Elements of a row that a thread converts where nothing of the row has to be known before.
constexpr int kRun = 8;

// Thread = a run of a row in its own type, zero from K to the stride; blockIdx.x = the row, so that
// one long row is as quick as many. `wide`: runs of 16-bit elements lie on 16 bytes.
__global__ __launch_bounds__(kThreads) void CopyRows(Reader x, void* out, int64_t stride,
                                                     bool wide) {
  LaunchDependents();
  const int64_t row = blockIdx.x;
  const int64_t first = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kRun;
  if (first >= stride) return;
  const int64_t at = row * stride + first;
  float v[kRun];
#pragma unroll
  for (int i = 0; i < kRun; ++i) v[i] = first + i < x.k ? x.At(row, first + i) : 0.0f;
  if (x.dtype == DType::kFp32) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if (first + i < stride) static_cast<float*>(out)[at + i] = v[i];
    }
    return;
  }
  uint32_t pairs[kRun / 2];
#pragma unroll
  for (int i = 0; i < kRun / 2; ++i) {
    pairs[i] = x.dtype == DType::kFp16 ? ToFp16x2(v[2 * i], v[2 * i + 1])
                                       : ToBf16x2(v[2 * i], v[2 * i + 1]);
  }
  uint16_t* const to = static_cast<uint16_t*>(out) + at;
  if (wide) {
    *reinterpret_cast<uint4*>(to) = {pairs[0], pairs[1], pairs[2], pairs[3]};
    return;
  }
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    if (first + i < stride) to[i] = pairs[i / 2] >> i % 2 * 16 & 0xffff;
  }
}

absl::Status LaunchCopyRows(const Reader& x, int64_t rows, void* out, int64_t stride,
                            StreamView stream) {
  const bool wide = stride % kRun == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0;
  const int64_t runs = CeilDiv(stride, int64_t{kRun});
  const LaunchConfig config{.grid = {static_cast<unsigned>(rows),
                                     static_cast<unsigned>(CeilDiv(runs, int64_t{kThreads}))},
                            .block = kThreads,
                            .stream = stream};
  return Launch<CopyRows>("common/prologue", config, x, out, stride, wide);
}

// ---- rows of INT8 -------------------------------------------------------------------------------

struct IntegerRows {
  const int8_t* x;       // [rows, k]
  const int32_t* order;  // or null
  int64_t k;
  int8_t* out;  // [rows, stride]
  int64_t stride;
  bool reordered;  // as a tensor core takes them
  bool wide;       // 16 elements of a row lie together on 16 bytes
};

// A run of 16 bytes in the order of IntegerSource.
__device__ __forceinline__ uint4 ReorderRun(const uint4& run) {
  constexpr uint32_t kLowPairs = 0x5140, kHighPairs = 0x7362;
  return {Prmt(run.x, run.z, kLowPairs), Prmt(run.x, run.z, kHighPairs),
          Prmt(run.y, run.w, kLowPairs), Prmt(run.y, run.w, kHighPairs)};
}

// Thread = a run of 16 elements, blockIdx.x = the row, so that one long row is as quick as many.
__global__ __launch_bounds__(kThreads) void CopyIntegers(const __grid_constant__ IntegerRows s) {
  LaunchDependents();
  const int64_t row = blockIdx.x;
  const int64_t first = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kIntegerRun;
  const int8_t* const x = s.x + row * s.k;
  int8_t* const out = s.out + row * s.stride;
  if (s.wide && first + kIntegerRun <= s.k) {
    const uint4 run = *reinterpret_cast<const uint4*>(x + first);
    *reinterpret_cast<uint4*>(out + first) = s.reordered ? ReorderRun(run) : run;
    return;
  }
  for (int at = 0; at < kIntegerRun && first + at < s.stride; ++at) {
    const int64_t i = first + (s.reordered ? IntegerSource(at) : at);
    out[first + at] = i < s.k ? x[s.order == nullptr ? i : s.order[i]] : 0;
  }
}

absl::Status LaunchCopyIntegers(const IntegerRows& rows, int64_t count, StreamView stream) {
  const int64_t runs = CeilDiv(rows.stride, int64_t{kIntegerRun});
  const LaunchConfig config{.grid = {static_cast<unsigned>(count),
                                     static_cast<unsigned>(CeilDiv(runs, int64_t{kThreads}))},
                            .block = kThreads,
                            .stream = stream};
  return Launch<CopyIntegers>("common/prologue", config, rows);
}

// ---- floating rows to INT8 ----------------------------------------------------------------------

// Quotients by `scale` as PrologueArgs says: round(v / scale), at least `least`, at most 127.
struct Quantizer {
  float scale;
  float least;  // -127 or -128
  // 1 / scale; 0 where it is not precise.
  float inverse;

  __device__ __forceinline__ Quantizer(float scale, float least) : scale(scale), least(least) {
    inverse = scale > 1e-36f && scale < 1e36f ? __frcp_rn(scale) : 0;
  }

  // Four as bytes of a word. A division takes a slow unit three times, so quotients are products by
  // the inverse. Where such a product lies so near the middle of two integers that a division might
  // round to the other, `*unsure` grows beyond kUnsure.
  static constexpr float kUnsure = 0.5f - 1.0f / 32768;
  __device__ __forceinline__ uint32_t Four(const float (&v)[4], float* unsure) const {
    constexpr float kRound = 12582912;  // 1.5 * 2^23: the last bits of a sum are the integer
    uint32_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float quotient = fminf(fmaxf(v[i] * inverse, least), 127);
      const float sum = quotient + kRound;
      *unsure = fmaxf(*unsure, fabsf(quotient - (sum - kRound)));
      bits[i] = __float_as_uint(sum);
    }
    constexpr uint32_t kLowBytes = 0x0040, kLowPairs = 0x5410;
    return Prmt(Prmt(bits[0], bits[1], kLowBytes), Prmt(bits[2], bits[3], kLowBytes), kLowPairs);
  }
  __device__ __forceinline__ uint32_t FourByDivision(const float (&v)[4]) const {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int q = __float2int_rn(fminf(fmaxf(v[i] / scale, least), 127));
      word |= (static_cast<uint32_t>(q) & 255) << (i * 8);
    }
    return word;
  }
};

// Quantizes a run and stores it; `room`: elements from `out` to the end of its row.
__device__ __forceinline__ void StoreRun(const float (&v)[kIntegerRun], const Quantizer& quantizer,
                                         bool reordered, int8_t* out, int64_t room) {
  uint32_t words[kIntegerRun / 4];
  float unsure = quantizer.inverse == 0 ? 1 : 0;
  const auto four = [&](int word, float(&of)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      of[i] = reordered ? v[IntegerSource(4 * word + i)] : v[4 * word + i];
  };
#pragma unroll
  for (int word = 0; word < kIntegerRun / 4; ++word) {
    float of[4];
    four(word, of);
    words[word] = quantizer.Four(of, &unsure);
  }
  if (unsure > Quantizer::kUnsure) {
#pragma unroll
    for (int word = 0; word < kIntegerRun / 4; ++word) {
      float of[4];
      four(word, of);
      words[word] = quantizer.FourByDivision(of);
    }
  }
  if (room >= kIntegerRun && reinterpret_cast<uintptr_t>(out) % 16 == 0) {
    *reinterpret_cast<uint4*>(out) = {words[0], words[1], words[2], words[3]};
    return;
  }
#pragma unroll
  for (int at = 0; at < kIntegerRun; ++at) {
    if (at < room) out[at] = static_cast<int8_t>(words[at / 4] >> (at % 4 * 8));
  }
}

struct Int8Rows {
  int8_t* out;  // [rows, stride]
  int64_t stride;
  float* scales;       // out
  const float* given;  // [rows] or null
  bool reordered;
  bool wide;
};

// `largest`: LargestOfBlock of the row. Stores its scale.
__device__ __forceinline__ Quantizer QuantizerOfRow(const Int8Rows& to, int64_t row, int largest) {
  float scale = to.given == nullptr ? __int_as_float(largest) / 127 : to.given[row];
  if (scale == 0) scale = 1;
  if (threadIdx.x == 0) {
    to.scales[row] = largest < kInfinityBits ? scale : __int_as_float(0x7fc00000);
  }
  return {scale, to.given == nullptr ? -127.0f : -128.0f};
}

// Floating rows become INT8 and a scale, as PrologueArgs says. Block = one row, a thread takes runs
// of 16. A row that has no more runs than the block has threads is read once.
__global__ __launch_bounds__(kMostRunThreads) void QuantizeRows(Reader x, Int8Rows to) {
  LaunchDependents();
  const int64_t row = blockIdx.x, step = int64_t{blockDim.x} * kIntegerRun;
  const int64_t mine = threadIdx.x * kIntegerRun;
  float v[kIntegerRun];
  int largest = 0;
  for (int64_t first = mine; first < x.k; first += step) {
    LoadRun(x, row, first, to.wide, v);
    largest = LargestOfRun(v, largest);
  }
  largest = LargestOfBlock(largest);
  const Quantizer quantizer = QuantizerOfRow(to, row, largest);
  for (int64_t first = mine; first < to.stride; first += step) {
    if (step < to.stride || first >= x.k) LoadRun(x, row, first, to.wide, v);
#pragma unroll
    for (int i = 0; i < kIntegerRun; ++i) v[i] = largest < kInfinityBits ? v[i] : 0;
    StoreRun(v, quantizer, to.reordered, to.out + row * to.stride + first, to.stride - first);
  }
}

// The same for many rows of 16-bit elements on 16 bytes, of whole runs. A thread keeps kHeldRuns
// runs as they are, so a block has few threads and a multiprocessor several rows: while one waits
// for the largest of its row, others load. H200, 2026-11-29, 4096 rows of 14336 and their product
// with 4-bit codes: 355 us instead of 413.
constexpr int kHeldRuns = 4;
constexpr int kMostHeldThreads = 512;

__global__ __launch_bounds__(kMostHeldThreads, 2) void QuantizeHeldRows(Reader x, Int8Rows to) {
  LaunchDependents();
  const int64_t row = blockIdx.x;
  const int runs = static_cast<int>(x.k / kIntegerRun);
  const uint4* const from =
      reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(x.x) + row * x.k);
  uint4 held[kHeldRuns][2];
  int run[kHeldRuns];
#pragma unroll
  for (int i = 0; i < kHeldRuns; ++i) {
    run[i] = i * blockDim.x + threadIdx.x;
    if (run[i] < runs) held[i][0] = from[2 * run[i]], held[i][1] = from[2 * run[i] + 1];
  }
  float v[kIntegerRun];
  int largest = 0;
#pragma unroll
  for (int i = 0; i < kHeldRuns; ++i) {
    if (run[i] >= runs) continue;
    WidenRun(held[i], x.dtype, v);
    largest = LargestOfRun(v, largest);
  }
  largest = LargestOfBlock(largest);
  const Quantizer quantizer = QuantizerOfRow(to, row, largest);
#pragma unroll
  for (int i = 0; i < kHeldRuns; ++i) {
    const int64_t first = int64_t{run[i]} * kIntegerRun;
    if (first >= to.stride) continue;
    if (run[i] < runs && largest < kInfinityBits) {
      WidenRun(held[i], x.dtype, v);
    } else {
#pragma unroll
      for (float& of : v) of = 0;
    }
    StoreRun(v, quantizer, to.reordered, to.out + row * to.stride + first, to.stride - first);
  }
}

absl::Status LaunchQuantizeRows(const Reader& x, int64_t rows, const Int8Rows& to,
                                const DeviceInfo& device, StreamView stream) {
  // Rows of up to 512 runs are quantised as fast by blocks that have a thread for each.
  constexpr int kManyRuns = 512;
  const int64_t runs = CeilDiv(to.stride, int64_t{kIntegerRun});
  const int64_t held_threads = RoundUp(CeilDiv(runs, int64_t{kHeldRuns}), 32);
  const bool held = runs > kManyRuns && held_threads <= kMostHeldThreads &&
                    rows > device.sm_count && to.wide && x.dtype != DType::kFp32 &&
                    x.k % kIntegerRun == 0;
  const int64_t threads =
      held ? held_threads : std::min<int64_t>(RoundUp(runs, 32), kMostRunThreads);
  const LaunchConfig config{.grid = static_cast<unsigned>(rows),
                            .block = static_cast<unsigned>(threads),
                            .stream = stream};
  return held ? Launch<QuantizeHeldRows>("common/prologue", config, x, to)
              : Launch<QuantizeRows>("common/prologue", config, x, to);
}

// Forms of one byte an element.
bool IsBytes(InputForm form) {
  return form == InputForm::kTensorCoreIntegers || form == InputForm::kTensorCoreFloat8 ||
         form == InputForm::kQuantized;
}

int64_t Stride(InputForm form, int64_t k) {
  if (form == InputForm::kTensorCoreIntegers || form == InputForm::kTensorCoreFloat8) {
    return RoundUp(k, kIntegerBlock);
  }
  return form == InputForm::kTensorCore ? RoundUp(k, 8) : k;
}

}  // namespace

bool NeedsNoPrologue(InputForm form, const ConstMatrixView& x) {
  if (form == InputForm::kAny) return true;
  if (form == InputForm::kTensorCoreIntegers || form == InputForm::kTensorCoreFloat8) return false;
  if (form == InputForm::kQuantized) return x.dtype == DType::kInt8;
  return x.dtype != DType::kFp32 && x.cols % 8 == 0 &&
         reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

int64_t PrologueBytes(InputForm form, int64_t m, int64_t k) {
  const int64_t element = form == InputForm::kAny ? 4 : IsBytes(form) ? 1 : 2;
  const int64_t scales =
      form == InputForm::kTensorCoreFloat8 ? Float8ScalesBytes(m, k) : RoundUp(m * 4, 256);
  return RoundUp(m * Stride(form, k) * element, 256) + scales;
}

absl::Status RunPrologue(const PrologueArgs& args, PrologueResult* out, Device& device,
                         StreamView stream) {
  AWQD_RETURN_IF_ERROR(UseDevice(device.info().index));
  const ConstMatrixView& x = args.x;
  const int64_t stride = Stride(args.form, x.cols);
  const Reader reader = {x.data, x.dtype, args.order, args.factor, x.cols};
  const bool reordered = args.form == InputForm::kTensorCoreIntegers;
  // Rows of K elements on 16 bytes, in their order.
  const bool wide = args.order == nullptr && args.factor == nullptr && RowsOnSixteenBytes(x);
  out->x = {args.out, x.dtype, x.rows, x.cols};
  out->stride = stride;
  if (x.dtype == DType::kInt8) {
    return LaunchCopyIntegers(
        {.x = static_cast<const int8_t*>(x.data),
         .order = args.order,
         .k = x.cols,
         .out = static_cast<int8_t*>(args.out),
         .stride = stride,
         .reordered = reordered,
         .wide = RowsOnSixteenBytes(x) && stride % kIntegerRun == 0 && args.order == nullptr},
        x.rows, stream);
  }
  const int64_t rows = args.count > 0 ? args.count : x.rows;
  const auto scales_at = [&](int64_t element) {
    return reinterpret_cast<float*>(static_cast<char*>(args.out) +
                                    RoundUp(rows * stride * element, 256));
  };
  if (IsFloat8(args.quantization)) {
    return RunPrologueFloat8(
        args, stride, scales_at(args.form == InputForm::kTensorCoreFloat8 ? 1 : 2), out, stream);
  }
  if (IsBytes(args.form)) {
    out->x.dtype = DType::kInt8;
    float* const scales = scales_at(1);
    out->scale = scales;
    return LaunchQuantizeRows(reader, x.rows,
                              {.out = static_cast<int8_t*>(args.out),
                               .stride = stride,
                               .scales = scales,
                               .given = args.scales,
                               .reordered = reordered,
                               .wide = wide},
                              device.info(), stream);
  }
  if (args.form == InputForm::kAny || x.dtype != DType::kFp32) {
    const OrderedRows ordered = {static_cast<const uint16_t*>(x.data), args.order, x.rows, x.cols,
                                 static_cast<uint16_t*>(args.out),     stride};
    if (args.form == InputForm::kTensorCore && args.order != nullptr && args.factor == nullptr &&
        CanRunPrologueOrdered(ordered, device.info())) {
      return PrologueOrdered(ordered, device.info(), stream);
    }
    return LaunchCopyRows(reader, x.rows, args.out, stride, stream);
  }
  out->x.dtype = DType::kFp16;
  float* const scale = scales_at(2);
  out->scale = scale;
  const int64_t threads = RoundUp(CeilDiv(stride, int64_t{kIntegerRun}), 32);
  const LaunchConfig config{
      .grid = static_cast<unsigned>(x.rows),
      .block = static_cast<unsigned>(std::min<int64_t>(threads, kMostRunThreads)),
      .stream = stream};
  return Launch<ConvertToFp16>("common/prologue", config, reader, static_cast<uint16_t*>(args.out),
                               stride, scale, wide);
}

}  // namespace awqd::cuda
