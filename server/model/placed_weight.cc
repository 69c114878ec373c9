// Cutting weights into columns, and placing them.
#include "server/model/placed_weight.h"

#include <algorithm>
#include <cstring>
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

absl::Status CheckRoom(const CanonicalWeight& weight, const Device& device) {
  AWQD_ASSIGN_OR_RETURN(const int64_t bytes, PreparedBytes(weight, device.info()));
  const int64_t free = device.FreeBytes();
  if (bytes <= free) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("needs ", bytes, " bytes on ", device.info().id, ", got ", free, " free"));
}

absl::Status AddPart(const CanonicalWeight& weight, int64_t col_begin, Device& device,
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
  switch (sharding) {
    case Sharding::kReplicas:
      return "replicas";
    case Sharding::kColumns:
      return "columns";
    case Sharding::kModels:
      return "models";
  }
  return "";
}

std::shared_ptr<const PlacedWeight> Whole(std::shared_ptr<const DeviceWeight> weight) {
  auto out = std::make_shared<PlacedWeight>();
  out->shape = weight->shape;
  out->format = weight->format;
  out->has_bias = static_cast<bool>(weight->bias);
  out->parts.push_back({std::move(weight), 0});
  return out;
}

std::vector<ColumnSpan> CutColumns(int64_t n, int64_t parts) {
  parts = std::clamp<int64_t>(n / kLeastStep, 1, parts);
  int64_t step = kBestStep;
  while (step > kLeastStep && !Balanced(n, step, parts)) step /= 2;
  std::vector<ColumnSpan> out;
  for (int64_t part = 0; part < parts; ++part) {
    out.push_back(
        {FirstStep(n / step, part, parts) * step, FirstStep(n / step, part + 1, parts) * step});
  }
  out.back().end = n;
  return out;
}

CanonicalWeight TakeColumns(const CanonicalWeight& weight, ColumnSpan span) {
  CanonicalWeight out;
  out.k = weight.k;
  out.n = span.end - span.begin;
  out.scheme = weight.scheme;
  out.format = weight.format;
  out.codes = TakeBytes(weight.codes, weight.row_bytes(), span.begin * weight.code_bits() / 8,
                        out.row_bytes());
  out.zeros = TakeBytes(weight.zeros, weight.n, span.begin, out.n);
  const int64_t scale_bytes = SizeOf(weight.scheme.scale_dtype);
  out.scales = TakeBytes(weight.scales, weight.n * scale_bytes, span.begin * scale_bytes,
                         out.n * scale_bytes);
  if (!weight.bias.empty()) {
    out.bias.assign(weight.bias.begin() + span.begin, weight.bias.begin() + span.end);
  }
  return out;
}

absl::StatusOr<std::shared_ptr<const PlacedWeight>> PlaceWeight(const CanonicalWeight& weight,
                                                                absl::Span<Device* const> devices,
                                                                bool cut) {
  AWQD_RETURN_IF_ERROR(Validate(weight));  // before it is cut
  auto out = std::make_shared<PlacedWeight>();
  out->shape = {weight.k, weight.n, weight.scheme};
  out->format = weight.format;
  out->has_bias = !weight.bias.empty();
  const std::vector<ColumnSpan> spans =
      CutColumns(weight.n, cut ? static_cast<int64_t>(devices.size()) : 1);
  if (spans.size() > 1) {
    for (size_t i = 0; i < spans.size(); ++i) {
      AWQD_RETURN_IF_ERROR(
          AddPart(TakeColumns(weight, spans[i]), spans[i].begin, *devices[i], out.get()));
    }
  } else {
    // Too narrow to cut: one device is enough.
    for (Device* device : cut ? devices.first(1) : devices) {
      AWQD_RETURN_IF_ERROR(AddPart(weight, 0, *device, out.get()));
    }
  }
  return std::shared_ptr<const PlacedWeight>(std::move(out));
}

}  // namespace awqd::model
