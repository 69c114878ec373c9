// Cutting weights into columns, and placing them.
#include "server/model/placed_weight.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/kernels.h"

namespace awqd::model {
namespace {

// Of 8 columns, codes of any width begin and end at whole bytes.
constexpr int64_t kLeastStep = 8;
constexpr int64_t kBestStep = 128;

// Steps of part `part`, the first one it takes.
int64_t FirstStep(int64_t steps, int64_t part, int64_t parts) { return steps * part / parts; }

bool Balanced(int64_t n, int64_t step, int64_t parts) {
  int64_t widest = 0;
  const int64_t steps = n / step;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = FirstStep(steps, part, parts) * step;
    const int64_t end = part + 1 == parts ? n : FirstStep(steps, part + 1, parts) * step;
    widest = std::max(widest, end - begin);
  }
  return steps >= parts && widest * parts * 16 <= n * 17;
}

// Rows of `row_bytes` beginning at `begin`, of which [begin, begin + width) are kept.
std::vector<uint8_t> TakeBytes(const std::vector<uint8_t>& from, int64_t row_bytes, int64_t begin,
                               int64_t width) {
  if (from.empty()) return {};
  const int64_t rows = static_cast<int64_t>(from.size()) / row_bytes;
  std::vector<uint8_t> out(rows * width);
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(out.data() + row * width, from.data() + row * row_bytes + begin, width);
  }
  return out;
}

// Columns that a cut must not part, because they share a scale. A scale for all columns is copied.
int64_t BlockOf(const HostWeight& weight) {
  const int64_t block = weight.description.block_cols;
  return block == 0 ? 1 : block;
}

absl::Status CheckRoom(const HostWeight& weight, const Device& device) {
  AWQD_ASSIGN_OR_RETURN(const int64_t bytes, PreparedBytes(weight, device.info()));
  const int64_t free = device.FreeBytes();
  if (bytes <= free) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("needs ", bytes, " bytes on ", device.info().id, ", got ", free, " free"));
}

absl::Status AddPart(const HostWeight& weight, int64_t col_begin, Device& device,
                     PlacedWeight* out) {
  AWQD_RETURN_IF_ERROR(CheckRoom(weight, device));
  AWQD_ASSIGN_OR_RETURN(std::shared_ptr<const DeviceWeight> part, PrepareWeight(weight, device));
  out->parts.push_back({std::move(part), col_begin});
  return absl::OkStatus();
}

}  // namespace

int64_t PlacedWeight::bytes() const {
  int64_t bytes = 0;
  for (const WeightPart& part : parts) bytes += part.weight->bytes();
  return bytes;
}

std::string PlacedWeight::devices() const {
  return absl::StrJoin(parts, ",", [](std::string* out, const WeightPart& part) {
    out->append(part.weight->device->info().id);
  });
}

absl::string_view Name(Sharding sharding) {
  constexpr absl::string_view kNames[] = {"replicas", "columns", "models"};
  return kNames[static_cast<int>(sharding)];
}

namespace {

// Calls part(what a device gets of the weight, its first column, device) until one fails.
template <typename Part>
absl::Status ForEachPart(const HostWeight& weight, absl::Span<Device* const> devices, bool cut,
                         Part part) {
  const std::vector<ColumnSpan> spans =
      CutColumns(weight.n, cut ? static_cast<int64_t>(devices.size()) : 1, BlockOf(weight));
  if (spans.size() > 1) {
    for (size_t i = 0; i < spans.size(); ++i) {
      AWQD_RETURN_IF_ERROR(part(TakeColumns(weight, spans[i]), spans[i].begin, *devices[i]));
    }
    return absl::OkStatus();
  }
  // Too narrow to cut: one device is enough.
  for (Device* device : cut ? devices.first(1) : devices) {
    AWQD_RETURN_IF_ERROR(part(weight, 0, *device));
  }
  return absl::OkStatus();
}

}  // namespace

std::shared_ptr<const PlacedWeight> Whole(std::shared_ptr<const DeviceWeight> weight) {
  auto out = std::make_shared<PlacedWeight>();
  out->shape = weight->shape;
  out->format = weight->format;
  out->has_bias = weight->sections.Has(Part::kBias);
  out->parts.push_back({std::move(weight), 0});
  return out;
}

std::vector<ColumnSpan> CutColumns(int64_t n, int64_t parts, int64_t block) {
  const int64_t least = std::lcm(kLeastStep, block);
  parts = std::clamp<int64_t>(n / least, 1, parts);
  int64_t step = std::lcm(kBestStep, block);
  while (step > least && !Balanced(n, step, parts)) step /= 2;
  std::vector<ColumnSpan> out;
  for (int64_t part = 0; part < parts; ++part) {
    out.push_back(
        {FirstStep(n / step, part, parts) * step, FirstStep(n / step, part + 1, parts) * step});
  }
  out.back().end = n;
  return out;
}

HostWeight TakeColumns(const HostWeight& weight, ColumnSpan span) {
  const WeightShape shape = weight.shape();
  HostWeight out;
  out.k = weight.k;
  out.n = span.end - span.begin;
  out.description = weight.description;
  out.format = weight.format;
  out.activations = weight.activations;
  out.codes = TakeBytes(weight.codes, weight.row_bytes(), span.begin * weight.code_bits() / 8,
                        out.row_bytes());
  // One cell for each column block; blocks that are wider than the whole stay whole.
  const int64_t block = shape.block_cols(), cells = shape.groups() * shape.column_blocks();
  const int64_t first = span.begin / block, count = CeilDiv(span.end, block) - first;
  const auto take = [&](const std::vector<uint8_t>& part) {
    const int64_t size = static_cast<int64_t>(part.size()) / cells;
    return TakeBytes(part, shape.column_blocks() * size, first * size, count * size);
  };
  out.zeros = take(weight.zeros);
  out.scales = take(weight.scales);
  out.table = weight.table;
  out.order = weight.order;
  out.factor = weight.factor;
  const auto take_columns = [&](const std::vector<float>& part) {
    if (static_cast<int64_t>(part.size()) != weight.n) return part;
    return std::vector<float>(part.begin() + span.begin, part.begin() + span.end);
  };
  out.outer =
      weight.description.outer == OuterKind::kOne ? weight.outer : take_columns(weight.outer);
  if (!weight.bias.empty()) out.bias = take_columns(weight.bias);
  return out;
}

absl::StatusOr<std::vector<PartBytes>> PlacedBytes(const HostWeight& weight,
                                                   absl::Span<Device* const> devices, bool cut) {
  std::vector<PartBytes> out;
  AWQD_RETURN_IF_ERROR(ForEachPart(
      weight, devices, cut, [&](const HostWeight& part, int64_t, Device& device) -> absl::Status {
        AWQD_ASSIGN_OR_RETURN(const int64_t bytes, PreparedBytes(part, device.info()));
        out.push_back({&device, part.n, bytes});
        return absl::OkStatus();
      }));
  return out;
}

absl::StatusOr<std::shared_ptr<const PlacedWeight>> PlaceWeight(const HostWeight& weight,
                                                                absl::Span<Device* const> devices,
                                                                bool cut) {
  AWQD_RETURN_IF_ERROR(Validate(weight));  // before it is cut
  auto out = std::make_shared<PlacedWeight>();
  out->shape = ShapeOf(weight);
  out->format = weight.format;
  out->has_bias = !weight.bias.empty();
  AWQD_RETURN_IF_ERROR(ForEachPart(weight, devices, cut,
                                   [&](const HostWeight& part, int64_t col_begin, Device& device) {
                                     return AddPart(part, col_begin, device, out.get());
                                   }));
  return std::shared_ptr<const PlacedWeight>(std::move(out));
}

}  // namespace awqd::model
