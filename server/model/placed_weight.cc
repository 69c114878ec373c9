// Slices weights by columns or rows, and places the slices. Makes stacks: every expert is there, and
// all are alike.
#include "server/model/placed_weight.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/math.h"
#include "kernels/base/parallel_for.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/file.h"
#include "kernels/kernels.h"
#include "kernels/scheme.h"

namespace awqd::model {
namespace {

// The codes of 8 columns begin and end at whole bytes, whatever their width.
constexpr int64_t kLeastStep = 8;
constexpr int64_t kBestStep = 128;

// The first step of part `part`.
int64_t FirstStep(int64_t steps, int64_t part, int64_t parts) { return steps * part / parts; }

bool IsBalanced(int64_t n, int64_t step, int64_t parts) {
  int64_t widest = 0;
  const int64_t steps = n / step;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = FirstStep(steps, part, parts) * step;
    const int64_t end = part + 1 == parts ? n : FirstStep(steps, part + 1, parts) * step;
    widest = std::max(widest, end - begin);
  }
  return steps >= parts && widest * parts * 16 <= n * 17;
}

// Copies bytes [begin, begin + width) of each row of `row_bytes`.
std::vector<uint8_t> CopyBytes(const std::vector<uint8_t>& from, int64_t row_bytes, int64_t begin,
                               int64_t width) {
  if (from.empty()) return {};
  const int64_t rows = static_cast<int64_t>(from.size()) / row_bytes;
  std::vector<uint8_t> out(rows * width);
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(out.data() + row * width, from.data() + row * row_bytes + begin, width);
  }
  return out;
}

HostWeight WithoutParts(const HostWeight& like, int64_t k, int64_t n) {
  HostWeight out;
  out.k = k;
  out.n = n;
  out.scheme = like.scheme;
  out.format = like.format;
  out.activations = like.activations;
  return out;
}

// Columns that slice a scale, and so stay together. A scale for all columns is copied.
int64_t ColumnBlock(const HostWeight& weight) {
  const int64_t block = weight.scheme.block_cols;
  return block == 0 ? 1 : block;
}

absl::Status CheckRoom(const HostWeight& weight, const Device& device) {
  AWQD_ASSIGN_OR_RETURN(const int64_t bytes, MeasureMost(weight, device.info()));
  const int64_t free = device.FreeBytes();
  if (bytes <= free) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("needs ", bytes, " bytes on ", device.info().id, ", got ", free, " free"));
}

// A device's slice of the weight.
struct Slice {
  ColumnSpan span;
  bool rows = false;  // the span's, else columns
  bool whole = true;  // the span is everything
};

// Returns the weight itself where the slice is whole; else copies the slice to `copy`.
const HostWeight& CopySlice(const HostWeight& weight, const Slice& slice, HostWeight* copy) {
  if (slice.whole) return weight;
  *copy = slice.rows ? CopyRows(weight, slice.span) : CopyColumns(weight, slice.span);
  return *copy;
}

absl::StatusOr<WeightPart> PrepareSlice(const HostWeight& weight, const Slice& slice,
                                        Device& device, const Arenas& arenas, PackMemory* memory) {
  HostWeight copy;
  const HostWeight& mine = CopySlice(weight, slice, &copy);
  WeightPart out;
  if (const auto arena = arenas.find(&device); arena != arenas.end()) {
    AWQD_ASSIGN_OR_RETURN(out.weight, PrepareWeightIn(*arena->second, mine, device, memory));
  } else {
    AWQD_RETURN_IF_ERROR(CheckRoom(mine, device));
    AWQD_ASSIGN_OR_RETURN(out.weight, PrepareWeight(mine, device, AllKernels(), memory));
  }
  if (!slice.whole) (slice.rows ? out.row_begin : out.col_begin) = slice.span.begin;
  return out;
}

// The slice of each device; fewer slices than devices when the weight is too small for all.
std::vector<Slice> ChooseSlices(const HostWeight& weight, size_t devices, Placing placing) {
  if (placing == Placing::kWhole) return std::vector<Slice>(devices);
  const auto parts = static_cast<int64_t>(devices);
  const bool rows = placing == Placing::kMlpRows;
  std::vector<ColumnSpan> spans;
  bool fits = false;
  if (placing != Placing::kColumns) {
    spans = SplitMlp(rows ? weight.k : weight.n, parts);
    fits = rows ? CanPartitionRows(weight, spans) : kBestStep % ColumnBlock(weight) == 0;
  }
  if (!fits) spans = SplitColumns(weight.n, parts, ColumnBlock(weight));
  std::vector<Slice> out;
  for (const ColumnSpan& span : spans) out.push_back({span, rows && fits, spans.size() == 1});
  return out;
}

using Experts = std::map<int64_t, std::shared_ptr<const PlacedWeight>>;

bool SamePlacement(const PlacedWeight& a, const PlacedWeight& b) {
  return absl::c_equal(a.parts, b.parts, [](const WeightPart& left, const WeightPart& right) {
    return left.weight->device == right.weight->device && left.col_begin == right.col_begin &&
           left.col_end() == right.col_end() && left.row_begin == right.row_begin &&
           left.row_end() == right.row_end();
  });
}

// The columns on each device: "cuda:0 [0, 64), cuda:1 [64, 128)".
std::string Placement(const PlacedWeight& weight) {
  return absl::StrJoin(weight.parts, ", ", [](std::string* out, const WeightPart& part) {
    absl::StrAppend(out, part.weight->device->info().id, " [", part.col_begin, ", ", part.col_end(),
                    ")");
  });
}

// Whether it may be anywhere among the experts of an expert-parallel stack.
bool OnOneDevice(const PlacedWeight& weight) {
  return weight.parts.size() == 1 && !weight.partitioned();
}

// Empty where the two are alike, else "<what>: got <of weight>, expected <of first>".
std::string ExplainDifference(const PlacedWeight& weight, const PlacedWeight& first,
                              bool expert_parallel) {
  const auto differ = [](absl::string_view what, const auto& got, const auto& expected) {
    return absl::StrCat(what, ": got ", got, ", expected ", expected);
  };
  if (weight.shape.k != first.shape.k) return differ("K", weight.shape.k, first.shape.k);
  if (weight.shape.n != first.shape.n) return differ("N", weight.shape.n, first.shape.n);
  if (weight.shape.scheme != first.shape.scheme) {
    return differ("scheme", ToString(weight.shape.scheme), ToString(first.shape.scheme));
  }
  if (weight.has_bias != first.has_bias) {
    return differ("bias", weight.has_bias ? "one" : "none", first.has_bias ? "one" : "none");
  }
  if (SamePlacement(weight, first)) return "";
  if (expert_parallel && OnOneDevice(weight) && OnOneDevice(first)) return "";
  return differ("devices", Placement(weight), Placement(first));
}

// The lowest number that has no expert; the number of experts where none is missing.
int64_t LowestMissing(const Experts& experts) {
  int64_t next = 0;
  for (const auto& [number, weight] : experts) {
    if (number != next) break;
    ++next;
  }
  return next;
}

absl::Status BadStack(absl::string_view path, absl::string_view what) {
  return absl::FailedPreconditionError(absl::StrCat("stack ", Quoted(path), ": ", what));
}

// Shares in the order of their lowest experts; none where one device has all.
void AddShards(WeightStack* stack) {
  std::vector<std::shared_ptr<WeightStack>> shards;
  std::vector<ExpertPlace> places;
  std::map<const Device*, size_t> of_device;
  for (const auto& expert : stack->experts) {
    const auto [it, fresh] = of_device.emplace(expert->parts.front().weight->device, shards.size());
    if (fresh) shards.push_back(std::make_shared<WeightStack>());
    WeightStack& shard = *shards[it->second];
    places.push_back({it->second, static_cast<int32_t>(shard.experts.size())});
    shard.experts.push_back(expert);
  }
  if (shards.size() == 1) return;
  stack->shards.assign(shards.begin(), shards.end());
  stack->places = std::move(places);
}

}  // namespace

int64_t HostBytes(const HostWeight& weight) {
  const WeightShape shape = weight.shape();
  const QuantizationScheme& d = weight.scheme;
  const size_t numbers = weight.table.size() + weight.outer.size() + weight.order.size() +
                         weight.factor.size() + weight.bias.size();
  return weight.code_rows() * weight.row_bytes() +
         shape.cells() * (d.scale_bytes() + d.zero_bytes()) + static_cast<int64_t>(numbers * 4);
}

absl::StatusOr<int64_t> MeasureMost(const HostWeight& weight, const DeviceInfo& device) {
  AWQD_ASSIGN_OR_RETURN(const PreparedSize bytes, PreparedBytes(weight, device));
  return bytes.most;
}

std::string PlacedWeight::devices() const {
  return absl::StrJoin(parts, ",", [](std::string* out, const WeightPart& part) {
    out->append(part.weight->device->info().id);
  });
}

absl::string_view Name(Sharding sharding) {
  constexpr absl::string_view kNames[] = {"replicas", "columns", "models", "experts"};
  return kNames[static_cast<int>(sharding)];
}

std::shared_ptr<const PlacedWeight> MakeWhole(std::shared_ptr<const DeviceWeight> weight) {
  auto out = std::make_shared<PlacedWeight>();
  out->shape = weight->shape;
  out->format = weight->format;
  out->has_bias = weight->sections.Has(Part::kBias);
  out->parts.push_back({std::move(weight), 0});
  return out;
}

std::vector<ColumnSpan> SplitColumns(int64_t n, int64_t parts, int64_t block) {
  const int64_t least = std::lcm(kLeastStep, block);
  parts = std::clamp<int64_t>(n / least, 1, parts);
  int64_t step = std::lcm(kBestStep, block);
  while (step > least && !IsBalanced(n, step, parts)) step /= 2;
  std::vector<ColumnSpan> out;
  for (int64_t part = 0; part < parts; ++part) {
    out.push_back(
        {FirstStep(n / step, part, parts) * step, FirstStep(n / step, part + 1, parts) * step});
  }
  out.back().end = n;
  return out;
}

std::vector<ColumnSpan> SplitMlp(int64_t count, int64_t parts) {
  return SplitColumns(count, parts, kBestStep);
}

HostWeight CopyColumns(const HostWeight& weight, ColumnSpan span) {
  const WeightShape shape = weight.shape();
  HostWeight out = WithoutParts(weight, weight.k, span.end - span.begin);
  out.codes = CopyBytes(weight.codes, weight.row_bytes(), span.begin * weight.code_bits() / 8,
                        out.row_bytes());
  // One cell for each column block; blocks that are wider than the whole stay whole.
  const int64_t block = shape.block_cols(), cells = shape.groups() * shape.column_blocks();
  const int64_t first = span.begin / block, count = CeilDiv(span.end, block) - first;
  const auto take = [&](const std::vector<uint8_t>& part) {
    const int64_t size = static_cast<int64_t>(part.size()) / cells;
    return CopyBytes(part, shape.column_blocks() * size, first * size, count * size);
  };
  out.zeros = take(weight.zeros);
  out.scales = take(weight.scales);
  out.table = weight.table;
  out.order = weight.order;
  out.factor = weight.factor;
  out.hadamard = weight.hadamard;
  const auto take_columns = [&](const std::vector<float>& part) {
    if (static_cast<int64_t>(part.size()) != weight.n) return part;
    return std::vector<float>(part.begin() + span.begin, part.begin() + span.end);
  };
  out.outer = weight.scheme.outer == OuterKind::kOne ? weight.outer : take_columns(weight.outer);
  if (!weight.bias.empty()) out.bias = take_columns(weight.bias);
  return out;
}

bool CanPartitionRows(const HostWeight& weight, absl::Span<const ColumnSpan> spans) {
  const int64_t group = weight.group_rows();
  // A block of vector codes or of a trellis stays whole, even if it is the only one.
  const bool any = group == weight.k && weight.scheme.rows_of_code() == 1;
  return weight.order.empty() && !weight.transforms_input() &&
         absl::c_all_of(spans,
                        [&](const ColumnSpan& span) { return any || span.begin % group == 0; });
}

HostWeight CopyRows(const HostWeight& weight, ColumnSpan span) {
  HostWeight out = WithoutParts(weight, span.end - span.begin, weight.n);
  const auto take = [](const std::vector<uint8_t>& part, int64_t rows, int64_t begin, int64_t end) {
    const int64_t bytes = static_cast<int64_t>(part.size()) / rows;
    return std::vector<uint8_t>(part.begin() + begin * bytes, part.begin() + end * bytes);
  };
  const int64_t block = weight.k / weight.code_rows();
  out.codes = take(weight.codes, weight.code_rows(), span.begin / block, span.end / block);
  // One group of all rows stays one.
  const int64_t rows = weight.group_rows(), groups = weight.groups();
  const int64_t first = groups == 1 ? 0 : span.begin / rows;
  const int64_t last = groups == 1 ? 1 : CeilDiv(span.end, rows);
  out.zeros = take(weight.zeros, groups, first, last);
  out.scales = take(weight.scales, groups, first, last);
  if (out.scheme.block_rows > out.k) out.scheme.block_rows = 0;
  out.table = weight.table;
  out.outer = weight.outer;
  if (span.begin == 0) out.bias = weight.bias;
  return out;
}

absl::StatusOr<std::vector<PartBytes>> MeasurePlaced(const HostWeight& weight,
                                                     absl::Span<Device* const> devices,
                                                     Placing placing) {
  std::vector<PartBytes> out;
  for (const Slice& slice : ChooseSlices(weight, devices.size(), placing)) {
    HostWeight copy;
    const HostWeight& mine = CopySlice(weight, slice, &copy);
    Device* const device = devices[out.size()];
    AWQD_ASSIGN_OR_RETURN(const PreparedSize bytes, PreparedBytes(mine, device->info()));
    out.push_back(
        {device, slice.whole ? 0 : mine.k * mine.n, bytes.most, bytes.least == bytes.most});
  }
  return out;
}

absl::StatusOr<std::shared_ptr<const PlacedWeight>> PlaceWeight(const HostWeight& weight,
                                                                absl::Span<Device* const> devices,
                                                                Placing placing,
                                                                const Arenas& arenas,
                                                                PackMemory* memory) {
  AWQD_RETURN_IF_ERROR(Validate(weight));  // before it is sliced
  auto out = std::make_shared<PlacedWeight>();
  out->shape = ShapeOf(weight);
  out->format = weight.format;
  out->has_bias = !weight.bias.empty();
  const std::vector<Slice> slices = ChooseSlices(weight, devices.size(), placing);
  std::vector<absl::StatusOr<WeightPart>> parts(slices.size());
  ParallelFor(slices.size(), [&](size_t i) {
    try {
      parts[i] = PrepareSlice(weight, slices[i], *devices[i], arenas, memory);
    } catch (const std::bad_alloc&) {
      parts[i] = absl::ResourceExhaustedError("host memory ran out while it was packed");
    }
  });
  for (absl::StatusOr<WeightPart>& part : parts) {
    AWQD_RETURN_IF_ERROR(part.status());
    out->parts.push_back(*std::move(part));
  }
  return std::shared_ptr<const PlacedWeight>(std::move(out));
}

std::string WeightStack::devices() const {
  if (!expert_parallel()) return experts.front()->devices();
  return absl::StrJoin(shards, ",", [](std::string* out, const auto& shard) {
    out->append(shard->experts.front()->devices());
  });
}

absl::StatusOr<std::shared_ptr<const WeightStack>> MakeStack(std::string path,
                                                             const Experts& experts,
                                                             bool expert_parallel) {
  if (experts.empty()) return BadStack(path, "got no expert, expected at least one");
  const auto count = static_cast<int64_t>(experts.size());
  if (const int64_t missing = LowestMissing(experts); missing != count) {
    return BadStack(path, absl::StrCat("expert ", missing, " is missing, got ", count,
                                       count == 1 ? " expert" : " experts", " up to number ",
                                       experts.rbegin()->first));
  }
  const PlacedWeight& first = *experts.begin()->second;
  auto out = std::make_shared<WeightStack>();
  for (const auto& [number, weight] : experts) {
    if (const std::string difference = ExplainDifference(*weight, first, expert_parallel);
        !difference.empty()) {
      return BadStack(path, absl::StrCat("expert ", number, ": ", difference, ", as expert 0 has"));
    }
    out->experts.push_back(weight);
  }
  out->path = std::move(path);
  if (expert_parallel) AddShards(out.get());
  return std::shared_ptr<const WeightStack>(std::move(out));
}

std::shared_ptr<const WeightStack> StackOfOne(std::shared_ptr<const PlacedWeight> weight) {
  auto out = std::make_shared<WeightStack>();
  out->experts.push_back(std::move(weight));
  return out;
}

}  // namespace awqd::model
