// Times mixtures of experts and the 4-bit key/value cache.
#include "tests/bench/layers.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/base/math.h"
#include "kernels/exact.h"
#include "kernels/kernels.h"
#include "kernels/kv4.h"
#include "tests/bench/cases.h"
#include "tests/bench/library.h"
#include "tests/testing/random_weight.h"
#include "tests/testing/test_device.h"

namespace awqd::bench {
namespace {

// Equal experts in memory of their own; and a product's table for each routing.
struct Stack {
  double gain = 0;  // the size of a sum beside that of activations, by the weights' mean square
  HostWeight canonical;
  std::vector<std::shared_ptr<const DeviceWeight>> weights;
  std::vector<const DeviceWeight*> experts;
  std::vector<Buffer> tables;
};

template <typename T>
Buffer UploadOf(Device& device, const std::vector<T>& values) {
  std::vector<uint8_t> bytes(std::max<size_t>(values.size() * sizeof(T), 1));
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), values.size() * sizeof(T));
  return Upload(device, bytes);
}

Buffer Room(Device& device, int64_t bytes) {
  return device.Allocate(MemoryKind::kDevice, std::max<int64_t>(bytes, 256)).value();
}

double Gain(const HostWeight& weight) {
  constexpr int kSamples = 4096;
  std::mt19937_64 random(1);
  double sum = 0;
  for (int i = 0; i < kSamples; ++i) {
    const auto row = static_cast<int64_t>(random() % weight.k);
    const auto col = static_cast<int64_t>(random() % weight.n);
    const double value = WeightValue(weight, row, col);
    sum += value * value;
  }
  return std::sqrt(sum / kSamples * static_cast<double>(weight.k));
}

Stack MakeStack(int64_t count, const WeightShape& shape, uint64_t seed, Device& device) {
  Stack out;
  out.canonical =
      testing::RandomWeight({.k = shape.k, .n = shape.n, .scheme = shape.scheme, .seed = seed});
  out.gain = Gain(out.canonical);
  out.weights = {PrepareWeight(out.canonical, device).value()};
  const DeviceWeight& first = *out.weights[0];
  const std::vector<uint8_t> packed = Download(device, first.storage);
  while (static_cast<int64_t>(out.weights.size()) < count) {
    auto copy = std::make_shared<DeviceWeight>();
    copy->shape = first.shape, copy->layout = first.layout, copy->sections = first.sections;
    copy->device = first.device, copy->plan = first.plan;
    copy->storage = Upload(device, packed);
    out.weights.push_back(std::move(copy));
  }
  for (const auto& weight : out.weights) out.experts.push_back(weight.get());
  return out;
}

// The experts of each row in one call.
struct Routing {
  std::vector<int64_t> ends;
  int64_t active = 0;
  // int32 [rows], int32 [tokens * top_k], FP32 and int32 likewise
  Buffer sources, rows, weights, ids;
};

Routing MakeRouting(const MixtureCase& spec, int64_t tokens, uint64_t seed, Device& device) {
  std::mt19937_64 random(seed);
  std::vector<std::vector<int32_t>> of_expert(spec.experts);
  std::vector<int32_t> all(spec.experts);
  std::iota(all.begin(), all.end(), 0);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t j = 0; j < spec.top_k; ++j) {
      std::swap(all[j], all[j + random() % (spec.experts - j)]);
      of_expert[all[j]].push_back(static_cast<int32_t>(t * spec.top_k + j));
    }
  }
  Routing out;
  std::vector<int32_t> sources, rows(tokens * spec.top_k), ids(tokens * spec.top_k);
  for (const std::vector<int32_t>& choices : of_expert) {
    for (int32_t choice : choices) {
      ids[choice] = static_cast<int32_t>(out.ends.size());
      rows[choice] = static_cast<int32_t>(sources.size());
      sources.push_back(static_cast<int32_t>(choice / spec.top_k));
    }
    out.active += !choices.empty();
    out.ends.push_back(static_cast<int64_t>(sources.size()));
  }
  out.sources = UploadOf(device, sources);
  out.rows = UploadOf(device, rows);
  out.weights = UploadOf(device, std::vector<float>(rows.size(), 1.0f / spec.top_k));
  out.ids = UploadOf(device, ids);
  return out;
}

// A layer, and the buffers of calls of up to `tokens` tokens.
class Mixture {
 public:
  Mixture(const MixtureCase& spec, int64_t tokens, int routings, Machine& machine)
      : spec_(spec), tokens_(tokens), device_(machine.device()) {
    const WeightShape in = {spec.hidden, spec.middle, spec.scheme};
    const WeightShape out = {spec.middle, spec.hidden, spec.scheme};
    gate_and_up_ = MakeStack(2 * spec.experts, in, 1, device_);
    down_ = MakeStack(spec.experts, out, 3, device_);
    const int64_t rows = tokens * spec.top_k;
    // x has a size that makes answers of about 1, whatever the experts' weights are.
    const double between = 1 / std::sqrt(std::max(1.0, down_.gain));
    const auto factor = static_cast<float>(between / gate_and_up_.gain);
    std::vector<uint8_t> x = testing::RandomMatrix(tokens, spec.hidden, spec.x, 5);
    for (int64_t i = 0; i < tokens * spec.hidden; ++i) {
      StoreElement(x.data(), spec.x, i, testing::GetElement(x, spec.x, i) * factor);
    }
    x_ = Upload(device_, x);
    sorted_ = Room(device_, rows * spec.hidden * SizeOf(spec.x));
    middle_ = Room(device_, 2 * rows * spec.middle * 4);
    half_ = Room(device_, rows * spec.middle * 2);
    half_scale_ = Room(device_, rows * 4);
    factors_ = Room(device_, rows * 4);
    sums_ = Room(device_, rows * spec.hidden * 4);
    y_ = Room(device_, tokens * spec.hidden * SizeOf(spec.x));
    for (int i = 0; i < routings; ++i) {
      routings_.push_back(MakeRouting(spec, tokens, 100 + i, device_));
    }
    MakeTables();
  }

  void Run(int i, StreamView stream) {
    if (rounds() && !spec_.one_by_one) return RunFloat8(i, stream);
    const Routing& to = routings_[i];
    const int64_t rows = tokens_ * spec_.top_k;
    Check(GatherRows({.in = x_.data(),
                      .rows = static_cast<const int32_t*>(to.sources.data()),
                      .count = rows,
                      .row_bytes = spec_.hidden * SizeOf(spec_.x),
                      .out = sorted_.data(),
                      .factors = static_cast<float*>(factors_.data())},
                     device_, stream));
    const ConstMatrixView x = {sorted_.data(), spec_.x, rows, spec_.hidden};
    // As GatedMlpWork does it.
    const bool narrow = !rounds() && rows >= kNarrowRows &&
                        RowFor(gate_and_up_, i, spec_.x) != nullptr &&
                        RowFor(down_, i, DType::kFp16) != nullptr;
    const DType between = narrow ? spec_.x : DType::kFp32;
    const bool scaled = between == DType::kFp16;
    Multiply(gate_and_up_, i, {x, scaled ? static_cast<const float*>(factors_.data()) : nullptr},
             {middle_, between}, stream);
    auto* const gate = static_cast<char*>(middle_.data());
    GateArgs join = {.gate = gate,
                     .up = gate + rows * spec_.middle * SizeOf(between),
                     .count = rows * spec_.middle,
                     .activation = ActivationFunction::kSilu,
                     .dtype = between,
                     .sums_factor = NarrowFactor(between)};
    Tokens middle = {{gate, DType::kFp32, rows, spec_.middle}};
    if (!rounds() && RowFor(down_, i, DType::kFp16) != nullptr) {
      join.half = static_cast<uint16_t*>(half_.data());
      join.half_scale = static_cast<float*>(half_scale_.data());
      join.cols = spec_.middle;
      middle = {{half_.data(), DType::kFp16, rows, spec_.middle}, join.half_scale};
    }
    Check(MultiplyByUp(join, device_, stream));
    Multiply(down_, i, middle, {sums_, between}, stream);
    Combine(to, between, stream);
  }

  // The prologues gather rows and compute the middle.
  void RunFloat8(int i, StreamView stream) {
    const Routing& to = routings_[i];
    const int64_t rows = tokens_ * spec_.top_k;
    const DType between = rows >= kNarrowRows ? spec_.x : DType::kFp32;
    GroupedArgs args = Args(gate_and_up_, i, {{x_.data(), spec_.x, tokens_, spec_.hidden}},
                            middle_.data(), between);
    args.y.rows = 2 * rows;
    args.gather = static_cast<const int32_t*>(to.sources.data());
    args.sums_factor = NarrowFactor(between);
    Multiply(gate_and_up_, i, args, stream);
    auto* const gate = static_cast<char*>(middle_.data());
    const GateArgs join = {.gate = gate,
                           .up = gate + rows * spec_.middle * SizeOf(between),
                           .count = rows * spec_.middle,
                           .activation = ActivationFunction::kSilu,
                           .cols = spec_.middle,
                           .dtype = between};
    args = Args(down_, i, {{gate, between, rows, spec_.middle}}, sums_.data(), between);
    args.gate = &join;
    args.sums_factor = NarrowFactor(between);
    Multiply(down_, i, args, stream);
    Combine(to, between, stream);
  }

  void Combine(const Routing& to, DType between, StreamView stream) {
    Check(CombineRows({.in = sums_.data(),
                       .cols = spec_.hidden,
                       .rows = static_cast<const int32_t*>(to.rows.data()),
                       .weights = static_cast<const float*>(to.weights.data()),
                       .count = tokens_,
                       .terms = spec_.top_k,
                       .y = y_.data(),
                       .y_dtype = spec_.x,
                       .in_dtype = between},
                      device_, stream));
  }

  void UseLibrary(const Library& library) {
    library_ = std::make_unique<LibraryExperts>(library, spec_.experts, gate_and_up_.canonical,
                                                down_.canonical);
  }
  void RunLibrary(int i, StreamView stream) {
    const Routing& to = routings_[i];
    library_->Multiply({x_.data(), spec_.x, tokens_, spec_.hidden},
                       static_cast<const int32_t*>(to.ids.data()),
                       static_cast<const float*>(to.weights.data()), spec_.top_k,
                       spec_.quantization, {y_.data(), spec_.x, tokens_, spec_.hidden}, stream);
  }

  std::vector<uint8_t> y() const { return Download(device_, y_); }
  void set_one_by_one(bool value) { spec_.one_by_one = value; }
  // The average bytes of the experts that a call touches, over its routings.
  double touched_bytes() const {
    double experts = 0;
    for (const Routing& to : routings_) experts += static_cast<double>(to.active);
    const double each = 2 * gate_and_up_.weights[0]->bytes() + down_.weights[0]->bytes();
    return experts / routings_.size() * each;
  }
  std::string kernel() const {
    const KernelRow* const row = RowFor(gate_and_up_, 0, spec_.x);
    return row == nullptr ? "one by one" : std::string(row->name);
  }

 private:
  // Rows of activations and, if they have any, their scales.
  struct Tokens {
    ConstMatrixView x;
    const float* scale = nullptr;
  };

  struct Sums {
    const Buffer& room;
    DType dtype = DType::kFp32;
  };

  bool rounds() const { return spec_.quantization != ActivationQuantization::kNone; }

  GroupedArgs Args(const Stack& stack, int i, const Tokens& tokens, void* y,
                   DType y_dtype = DType::kFp32) const {
    GroupedArgs out = {.experts = stack.experts, .ends = routings_[i].ends, .x = tokens.x};
    out.x_scale = tokens.scale;
    out.quantization = spec_.quantization;
    out.y = {y, y_dtype, out.stacks() * tokens.x.rows, stack.weights[0]->shape.n};
    return out;
  }
  const KernelRow* RowFor(const Stack& stack, int i, DType x) const {
    return spec_.one_by_one ? nullptr : GroupedRow(Args(stack, i, {{nullptr, x, 0, 0}}, nullptr));
  }

  // Makes the tables that the engine uploads for each product.
  void MakeTables() {
    const int64_t rows = tokens_ * spec_.top_k;
    for (Stack* stack : {&gate_and_up_, &down_}) {
      const DType in = stack == &down_ ? DType::kFp16 : spec_.x;
      for (int i = 0; i < static_cast<int>(routings_.size()); ++i) {
        const GroupedArgs args =
            Args(*stack, i, {{nullptr, in, rows, stack->weights[0]->shape.k}}, nullptr);
        const KernelRow* const row = GroupedRow(args);
        const std::string table = row == nullptr ? " " : row->grouped_table(args);
        stack->tables.push_back(Upload(device_, {table.begin(), table.end()}));
      }
    }
  }

  void Multiply(const Stack& stack, int i, const Tokens& tokens, const Sums& y, StreamView stream) {
    Multiply(stack, i, Args(stack, i, tokens, y.room.data(), y.dtype), stream);
  }
  void Multiply(const Stack& stack, int i, GroupedArgs args, StreamView stream) {
    const KernelRow* const row = RowFor(stack, i, args.x.dtype);
    if (row == nullptr) return MultiplyOneByOne(args, stream);
    args.table = stack.tables[i].data();
    args.workspace = Workspace(GroupedWorkspaceBytes(args, *row));
    Check(GroupedMatmul(args, *row, stream));
  }

  void MultiplyOneByOne(const GroupedArgs& all, StreamView stream) {
    const int64_t experts = static_cast<int64_t>(all.ends.size());
    for (int64_t e = 0; e < experts * all.stacks(); ++e) {
      const int64_t number = e % experts, begin = number == 0 ? 0 : all.ends[number - 1];
      const int64_t rows = all.ends[number] - begin, y_row = e / experts * all.rows() + begin;
      if (rows == 0) continue;
      MatmulArgs args;
      args.weight = all.experts[e];
      args.x = {static_cast<const char*>(all.x.data) + begin * all.x.cols * SizeOf(all.x.dtype),
                all.x.dtype, rows, all.x.cols};
      args.quantization = all.quantization;
      args.y = {static_cast<float*>(all.y.data) + y_row * all.y.cols, DType::kFp32, rows,
                all.y.cols};
      args.workspace = Workspace(WorkspaceBytes(*args.weight, Path::kFused, rows,
                                                ActivationFunction::kNone, ProductOf(args)));
      Check(QuantizedMatmul(args, Path::kFused, stream));
    }
  }

  // Grows in the first calls, which are not captured.
  void* Workspace(int64_t bytes) {
    if (workspace_.size() < bytes) workspace_ = Room(device_, bytes * 2);
    return workspace_.data();
  }

  MixtureCase spec_;
  const int64_t tokens_;
  Device& device_;
  Stack gate_and_up_, down_;
  std::vector<Routing> routings_;
  std::unique_ptr<LibraryExperts> library_;
  Buffer x_, sorted_, middle_, half_, half_scale_, factors_, sums_, y_, workspace_;
};

double Difference(const std::vector<uint8_t>& a, const std::vector<uint8_t>& b, DType dtype) {
  double wrong = 0, all = 0;
  const int64_t count = static_cast<int64_t>(a.size()) / SizeOf(dtype);
  for (int64_t i = 0; i < count; ++i) {
    const double x = testing::GetElement(a, dtype, i), y = testing::GetElement(b, dtype, i);
    wrong += (x - y) * (x - y), all += y * y;
  }
  return std::sqrt(wrong / std::max(all, 1e-300));
}

// Enough routings that a round touches more weights than caches hold.
int Routings(const MixtureCase& spec, int64_t tokens, Machine& machine) {
  const double experts = std::min<double>(spec.experts, tokens * spec.top_k);
  const double bytes = experts * 3 * spec.hidden * spec.middle / 2;
  return static_cast<int>(std::clamp<double>(machine.cold_bytes() / bytes + 1, 2, 32));
}

}  // namespace

void TimeMixture(const MixtureCase& spec, const std::vector<int64_t>& tokens,
                 const Library* library, Machine& machine) {
  // Times of a call, as the server makes it and by the library.
  struct Way {
    std::string kernel;
    Call call;
    double us = HUGE_VAL, error = 0;
  };
  for (int64_t m : tokens) {
    const int routings = Routings(spec, m, machine);
    Mixture layer(spec, m, routings, machine);
    auto stream = machine.device().CreateStream().value();
    const Call run = [&](int i, StreamView s) { layer.Run(i, s); };
    const auto answer = [&](const Call& call) {
      for (int i = routings - 1; i >= 0; --i) call(i, stream->view());
      Check(stream->Synchronize());
      return layer.y();
    };
    layer.set_one_by_one(true);
    const std::vector<uint8_t> want = answer(run);
    layer.set_one_by_one(spec.one_by_one);
    std::vector<Way> ways = {{layer.kernel(), run}};
    if (library != nullptr) {
      layer.UseLibrary(*library);
      ways.push_back({"libawqd", [&](int i, StreamView s) { layer.RunLibrary(i, s); }});
    }
    for (Way& way : ways) {
      way.error = Difference(answer(way.call), want, spec.x);
      // Between the products a last place may decide to which E4M3 a number goes.
      if (!(way.error <= (IsFloat8(spec.quantization) ? 2e-2 : 4e-3))) {
        Fail(absl::StrCat("experts, ", way.kernel, ": error ", way.error));
      }
    }
    const int turns = library == nullptr ? 1 : 3;
    for (int turn = 0; turn < turns; ++turn) {
      for (Way& way : ways) way.us = std::min(way.us, machine.Time(routings, way.call));
    }
    const double bytes = layer.touched_bytes();
    const double flops = 6.0 * m * spec.top_k * spec.hidden * spec.middle;
    const std::vector<Floor> floors = machine.LayerFloors(static_cast<int64_t>(bytes), flops);
    double floor = 0;
    std::string json;
    for (const Floor& f : floors) {
      floor = std::max(floor, f.microseconds);
      absl::StrAppend(&json, ",\"", f.name, "_us\":", f.microseconds);
    }
    for (const Way& way : ways) {
      absl::PrintF("experts %d top %d %6d x %-6d tokens %-5d %-22s %10.2f us  floor %10.2f  %.2f\n",
                   spec.experts, spec.top_k, spec.hidden, spec.middle, m, way.kernel, way.us, floor,
                   way.us / floor);
      absl::PrintF(
          "{\"row\":\"experts\",\"kernel\":\"%s\",\"experts\":%d,\"top_k\":%d,\"k\":%d,"
          "\"n\":%d,\"m\":%d,\"us\":%.2f,\"error\":%.2e%s}\n",
          way.kernel, spec.experts, spec.top_k, spec.hidden, spec.middle, m, way.us, way.error,
          json);
    }
    std::fflush(stdout);
  }
}

void TimeKv4(int64_t tokens, int64_t heads, int64_t head_dim, Machine& machine) {
  Device& device = machine.device();
  const Kv4Shape shape = {tokens, heads, head_dim};
  const int64_t elements = shape.rows() * head_dim, wide = elements * 2;
  const int64_t narrow = shape.code_bytes() + shape.rows() * 4;
  const int copies = static_cast<int>(std::max<int64_t>(2, machine.cold_bytes() / narrow + 1));
  const std::vector<uint8_t> x = testing::RandomMatrix(shape.rows(), head_dim, DType::kFp16, 6);
  struct Copy {
    Buffer x, codes, scale, zero;
  };
  std::vector<Copy> all(copies);
  for (Copy& copy : all) {
    copy = {Upload(device, x), Room(device, shape.code_bytes()), Room(device, shape.rows() * 2),
            Room(device, shape.rows() * 2)};
  }
  const auto store = [&](int i, StreamView stream) {
    Check(Kv4Store({.shape = shape,
                    .x = all[i].x.data(),
                    .codes = static_cast<uint8_t*>(all[i].codes.data()),
                    .scale = all[i].scale.data(),
                    .zero = all[i].zero.data()},
                   device, stream));
  };
  const auto load = [&](Kv4Form form) {
    return [&, form](int i, StreamView stream) {
      Check(Kv4Load({.shape = shape,
                     .codes = static_cast<const uint8_t*>(all[i].codes.data()),
                     .scale = all[i].scale.data(),
                     .zero = all[i].zero.data(),
                     .form = form,
                     .out = all[i].x.data()},
                    device, stream));
    };
  };
  const double stored = machine.Time(copies, store);
  const double exact = machine.Time(copies, load(Kv4Form::kExact));
  const double error = Difference(Download(device, all[0].x), x, DType::kFp16);
  if (!(error <= 0.1)) Fail(absl::StrCat("kv4: error ", error));
  const double fused = machine.Time(copies, load(Kv4Form::kFused));
  const double floor = machine.LayerFloors(wide + narrow, 0).front().microseconds;
  const std::tuple<const char*, double> lines[] = {
      {"kv4 store", stored}, {"kv4 load, exact", exact}, {"kv4 load, fused", fused}};
  for (const auto& [name, us] : lines) {
    absl::PrintF("%-16s %d x %d x %d %10.2f us  stream %10.2f  %.2f\n", name, tokens, heads,
                 head_dim, us, floor, us / floor);
    absl::PrintF(
        "{\"row\":\"%s\",\"tokens\":%d,\"heads\":%d,\"head_dim\":%d,\"us\":%.2f,"
        "\"stream_us\":%.2f}\n",
        name, tokens, heads, head_dim, us, floor);
  }
  std::fflush(stdout);
}

}  // namespace awqd::bench
