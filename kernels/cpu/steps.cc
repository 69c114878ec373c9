// Prologue and epilogue on the CPU: order, factor and transform before a product, the activation
// function after it. And the steps between the products of experts.
#include "kernels/steps.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "kernels/backends.h"
#include "kernels/base/math.h"
#include "kernels/cpu/device.h"
#include "kernels/cpu/rows.h"
#include "kernels/exact.h"

namespace awqd {
namespace {

// Elements of a task: fewer are not worth another thread.
constexpr int64_t kPerTask = int64_t{1} << 15;

ThreadPool& Pool(Device& device) { return CpuDevice::Of(&device).pool(); }

// Rows here read any type wherever it is, but for those that form integers.
bool NeedsNoPrologue(InputForm form, const ConstMatrixView& x) {
  return form != InputForm::kQuantized || x.dtype == DType::kInt8;
}

// Where the scales of INT8 tokens lie behind them.
int64_t ScalesOffset(int64_t m, int64_t k) { return RoundUp(m * k, sizeof(float)); }

int64_t PrologueBytes(InputForm form, int64_t m, int64_t k) {
  return form == InputForm::kQuantized ? ScalesOffset(m, k) + m * 4 : m * k * 4;
}

// Elements [begin, begin + count) of a row of x' in FP32: a product of two 16-bit numbers is exact
// there.
void LoadStaged(const PrologueArgs& args, int64_t m, int64_t begin, int64_t count, float* out,
                const cpu::Bodies& bodies) {
  const int64_t row = m * args.x.cols;
  if (args.order != nullptr || args.x.dtype == DType::kE4m3) {
    for (int64_t i = begin; i < begin + count; ++i) {
      out[i - begin] =
          LoadElement(args.x.data, args.x.dtype, row + (args.order == nullptr ? i : args.order[i]));
    }
  } else {
    const char* const x = static_cast<const char*>(args.x.data);
    bodies.to_float(x + (row + begin) * SizeOf(args.x.dtype), cpu::ElementOf(args.x.dtype), count,
                    out);
  }
  if (args.factor == nullptr) return;
  for (int64_t i = 0; i < count; ++i) {
    out[i] *= args.factor[args.order == nullptr ? begin + i : args.order[begin + i]];
  }
}

absl::StatusOr<ConstMatrixView> TransformRows(const TransformArgs& args, Device& device,
                                              StreamView) {
  const int64_t k = args.x.cols;
  float* const out = static_cast<float*>(args.out);
  const cpu::Bodies& bodies = cpu::BodiesFor(device.info().isa);
  Pool(device).ForEachRow(args.x.rows, k, kPerTask, [&](int64_t m) {
    float* const row = out + m * k;
    LoadStaged({.x = args.x, .factor = args.factor}, m, 0, k, row, bodies);
    for (int64_t i = 0; i < k; i += args.hadamard.size) TransformBlock(args.hadamard, row + i);
  });
  return ConstMatrixView{out, DType::kFp32, args.x.rows, k};
}

// --- To INT8 ---

constexpr int64_t kChunk = 512;
constexpr int32_t kInfinity = 0x7f800000;  // the bits of larger magnitudes are those of NaNs

// One token; returns its scale.
float QuantizeToken(const PrologueArgs& args, int64_t m, int8_t* out, const cpu::Bodies& bodies) {
  const int64_t k = args.x.cols;
  const bool given = args.quantization == ActivationQuantization::kStatic;
  float chunk[kChunk] = {};  // vectors read past a short last chunk: what is there is the token's
  int32_t largest = 0;
  for (int64_t i = 0; i < k; i += kChunk) {
    const int64_t count = std::min(kChunk, k - i);
    LoadStaged(args, m, i, count, chunk, bodies);
    largest = std::max(largest, bodies.largest_bits(chunk, count));
  }
  if (largest >= kInfinity) {
    std::fill(out, out + k, int8_t{0});
    return std::numeric_limits<float>::quiet_NaN();
  }
  float scale = given ? args.scales[m] : std::bit_cast<float>(largest) / 127;
  if (scale == 0) scale = 1;
  for (int64_t i = 0; i < k; i += kChunk) {
    const int64_t count = std::min(kChunk, k - i);
    LoadStaged(args, m, i, count, chunk, bodies);
    bodies.to_int8(chunk, count, scale, given ? -128 : -127, out + i);
  }
  return scale;
}

void Quantize(const PrologueArgs& args, PrologueResult* out, Device& device) {
  const int64_t m = args.x.rows, k = args.x.cols;
  const cpu::Bodies& bodies = cpu::BodiesFor(device.info().isa);
  auto* const staged = static_cast<int8_t*>(args.out);
  auto* const scales = reinterpret_cast<float*>(staged + ScalesOffset(m, k));
  Pool(device).ForEachRow(m, k, kPerTask, [&](int64_t row) {
    scales[row] = QuantizeToken(args, row, staged + row * k, bodies);
  });
  out->x = {staged, DType::kInt8, m, k};
  out->scale = scales;
}

// --- To E4M3 ---

// Replaces x' of a token by a * q (PrologueArgs).
void RoundToFloat8(const PrologueArgs& args, int64_t m, float* x) {
  constexpr int64_t kBlock = 128;
  const int64_t k = args.x.cols;
  const bool blocks = args.quantization == ActivationQuantization::kFloat8PerBlock;
  const bool codes = args.x.dtype == DType::kE4m3;  // x' is q
  for (int64_t i = 0; i < k; i += blocks ? kBlock : k) {
    const int64_t end = blocks ? std::min(i + kBlock, k) : k;
    int32_t largest = 0;
    for (int64_t e = i; e < end; ++e) {
      largest = std::max(largest, std::bit_cast<int32_t>(std::abs(x[e])));
    }
    if (largest >= kInfinity) {
      std::fill(x + i, x + end, std::numeric_limits<float>::quiet_NaN());
      continue;
    }
    float scale = codes && blocks          ? args.scales[m * CeilDiv(k, kBlock) + i / kBlock]
                  : args.scales != nullptr ? args.scales[m]
                                           : std::bit_cast<float>(largest) / kLargestE4m3;
    if (scale == 0) scale = 1;
    for (int64_t e = i; e < end; ++e) {
      x[e] = (codes ? x[e] : E4m3ToFloat(FloatToE4m3(x[e] / scale))) * scale;
    }
  }
}

// INT8 keeps its type: an order is all that there can be.
void StageIntegers(const PrologueArgs& args, PrologueResult* out, Device& device) {
  const int64_t k = args.x.cols;
  const int8_t* const x = static_cast<const int8_t*>(args.x.data);
  int8_t* const staged = static_cast<int8_t*>(args.out);
  Pool(device).ForEachRow(args.x.rows, k, kPerTask, [&](int64_t m) {
    for (int64_t i = 0; i < k; ++i) staged[m * k + i] = x[m * k + args.order[i]];
  });
  out->x = {staged, DType::kInt8, args.x.rows, k};
}

absl::Status RunPrologue(const PrologueArgs& args, PrologueResult* out, Device& device,
                         StreamView) {
  const int64_t k = args.x.cols;
  out->stride = k;
  if (args.x.dtype == DType::kInt8) {
    StageIntegers(args, out, device);
    return absl::OkStatus();
  }
  if (args.form == InputForm::kQuantized) {
    Quantize(args, out, device);
    return absl::OkStatus();
  }
  float* const staged = static_cast<float*>(args.out);
  const cpu::Bodies& bodies = cpu::BodiesFor(device.info().isa);
  Pool(device).ForEachRow(args.x.rows, k, kPerTask, [&](int64_t m) {
    LoadStaged(args, m, 0, k, staged + m * k, bodies);
    if (IsFloat8(args.quantization)) RoundToFloat8(args, m, staged + m * k);
  });
  out->x = {staged, DType::kFp32, args.x.rows, k};
  return absl::OkStatus();
}

absl::Status RunEpilogue(const EpilogueArgs& args, Device& device, StreamView) {
  Pool(device).ForEachRow(args.rows, args.cols, kPerTask, [&](int64_t m) {
    for (int64_t n = 0; n < args.cols; ++n) {
      const float sum = args.sums[m * args.ld_sums + n];
      const float value = args.bias == nullptr ? sum : sum + args.bias[n];
      StoreElement(args.y, args.y_dtype, m * args.ld_y + n, ActivateFloat(args.activation, value));
    }
  });
  return absl::OkStatus();
}

absl::Status ReorderRows(const ReorderArgs& args, Device& device, StreamView) {
  const int64_t bytes = args.cols * args.element_bytes;
  Pool(device).ForEachRow(args.k, args.cols, kPerTask, [&](int64_t row) {
    const int64_t to = args.order[row] - args.row_begin;
    if (to < 0 || to >= args.rows) return;
    std::memcpy(static_cast<char*>(args.out) + to * args.ld_out * args.element_bytes,
                static_cast<const char*>(args.in) + row * bytes, bytes);
  });
  return absl::OkStatus();
}

absl::Status GatherRows(const GatherArgs& args, Device& device, StreamView) {
  const auto* const in = static_cast<const char*>(args.in);
  auto* const out = static_cast<char*>(args.out);
  Pool(device).ForEachRow(args.count, args.row_bytes, kPerTask, [&](int64_t i) {
    std::memcpy(out + i * args.row_bytes, in + args.rows[i] * args.row_bytes, args.row_bytes);
  });
  return absl::OkStatus();
}

absl::Status MultiplyByUp(const GateArgs& args, Device& device, StreamView) {
  auto* const gate = static_cast<float*>(args.gate);
  const auto* const up = static_cast<const float*>(args.up);
  Pool(device).ParallelFor(CeilDiv(args.count, kPerTask), [&](int64_t task, int) {
    const int64_t end = std::min(args.count, (task + 1) * kPerTask);
    for (int64_t i = task * kPerTask; i < end; ++i) {
      gate[i] = GateFloat(args.activation, args.parameters, gate[i], up[i]);
    }
  });
  return absl::OkStatus();
}

absl::Status GateTokens(const TokenGateArgs& args, Device& device, StreamView) {
  const int64_t k = args.x.cols;
  const cpu::Bodies& bodies = cpu::BodiesFor(device.info().isa);
  Pool(device).ForEachRow(args.x.rows, k, kPerTask, [&](int64_t token) {
    const float* const gate = args.gates + args.which[token] * k;
    float chunk[kChunk];
    double sum = 0;
    for (int64_t i = 0; i < k; i += kChunk) {
      const int64_t count = std::min(kChunk, k - i);
      LoadStaged({.x = args.x}, token, i, count, chunk, bodies);
      for (int64_t n = 0; args.scales != nullptr && n < count; ++n) {
        chunk[n] *= args.scales[token * CeilDiv(k, args.scaled) + (i + n) / args.scaled];
      }
      for (int64_t n = 0; n < count; ++n) sum += double{chunk[n]} * gate[i + n];
    }
    args.out[token] = 1 / (1 + std::exp(-static_cast<float>(sum)));
  });
  return absl::OkStatus();
}

// Columns of a row that are summed at a time, so that the sums stay in the first cache.
constexpr int64_t kCombined = 256;

void CombineRow(const CombineArgs& args, int64_t i, int64_t begin, int64_t end) {
  float sums[kCombined] = {};
  for (int64_t j = i * args.terms; j < (i + 1) * args.terms; ++j) {
    if (args.rows[j] < 0) continue;
    const float* const in = static_cast<const float*>(args.in) + args.rows[j] * args.cols + begin;
    const float weight = args.weights == nullptr ? 1.0f : args.weights[j];
    if (j == i * args.terms) {  // not 0 + in: that would turn -0 into +0
      for (int64_t n = 0; n < end - begin; ++n) sums[n] = weight * in[n];
    } else {
      for (int64_t n = 0; n < end - begin; ++n) sums[n] += weight * in[n];
    }
  }
  if (args.added != nullptr) {
    const float* const added = args.added + i * args.cols + begin;
    const float weight = args.added_weights == nullptr ? 1.0f : args.added_weights[i];
    for (int64_t n = 0; n < end - begin; ++n) sums[n] += weight * added[n];
  }
  for (int64_t n = begin; n < end; ++n) {
    StoreElement(args.y, args.y_dtype, i * args.cols + n, sums[n - begin]);
  }
}

// A counting sort. `ends` counts the rows of each expert first, then is where its next one goes.
absl::Status SortChoices(const SortArgs& args, Device&, StreamView) {
  const auto has_row = [&](int32_t id) { return id >= 0 && id < args.experts; };
  std::fill_n(args.ends, args.experts, 0);
  std::fill_n(args.tokens, args.choices, 0);
  for (int64_t i = 0; i < args.choices; ++i) {
    if (has_row(args.ids[i])) ++args.ends[args.ids[i]];
  }
  std::exclusive_scan(args.ends, args.ends + args.experts, args.ends, 0);
  for (int64_t i = 0; i < args.choices; ++i) {
    const int32_t row = has_row(args.ids[i]) ? args.ends[args.ids[i]]++ : -1;
    args.rows[i] = row;
    if (row >= 0) args.tokens[row] = static_cast<int32_t>(i / args.top_k);
  }
  return absl::OkStatus();
}

absl::Status CombineRows(const CombineArgs& args, Device& device, StreamView) {
  Pool(device).ForEachRow(args.count, args.cols * args.terms, kPerTask, [&](int64_t i) {
    for (int64_t n = 0; n < args.cols; n += kCombined) {
      CombineRow(args, i, n, std::min(args.cols, n + kCombined));
    }
  });
  return absl::OkStatus();
}

}  // namespace

const Steps& CpuSteps() {
  static const Steps steps = {TransformRows, NeedsNoPrologue, PrologueBytes, RunPrologue,
                              RunEpilogue,   ReorderRows,     GatherRows,    MultiplyByUp,
                              GateTokens,    CombineRows,     SortChoices};
  return steps;
}

}  // namespace awqd
