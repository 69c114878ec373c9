// PlacedWeight: a weight as it is served: whole on one device or on several, or partitioned by
// columns or rows among them (tensor parallel). WeightStack: the experts of one projection of a
// mixture of experts, as one thing to multiply by.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/checkpoint/experts.h"
#include "kernels/kernels.h"
#include "kernels/lending/arena.h"
#include "kernels/weight.h"
#include "server/model/model_statistics.h"

namespace awqd::model {

// How several devices share the work; with one device all are the same. "replicas", "columns",
// "models", "experts".
enum class Sharding : uint8_t {
  kReplicas,  // every weight whole on every device; a request runs on one of them
  kColumns,   // every weight partitioned among the devices; a request runs on all of them
  kModels,    // every model whole on the device that has most room
  kExperts    // experts whole, each on one of the devices; every other weight as kReplicas
};

absl::string_view Name(Sharding sharding);

// The part of a weight that one device holds.
struct WeightPart {
  std::shared_ptr<const DeviceWeight> weight;
  int64_t col_begin = 0;  // of the whole weight
  int64_t row_begin = 0;

  int64_t col_end() const { return col_begin + weight->shape.n; }
  int64_t row_end() const { return row_begin + weight->shape.k; }
};

// Immutable once made; each part is freed with the last owner of it or of the whole.
struct PlacedWeight {
  WeightShape shape;  // of the whole
  std::string format;
  bool has_bias = false;
  // One or more, each on its own device. Either each is the whole weight, or together they are its
  // columns from 0 to N in order, or its rows from 0 to K. With rows, the first part has the bias.
  std::vector<WeightPart> parts;
  // The statistics of its model. Null for a weight that came in a request.
  std::shared_ptr<ModelStatistics> statistics;

  const DeclaredActivations& activations() const { return parts.front().weight->activations; }
  bool partitioned() const {
    return parts.front().weight->shape.n != shape.n || partitioned_at_rows();
  }
  bool partitioned_at_rows() const { return parts.front().weight->shape.k != shape.k; }
  // On all devices.
  int64_t bytes() const {
    int64_t bytes = 0;
    for (const WeightPart& part : parts) bytes += part.weight->bytes();
    return bytes;
  }
  std::string devices() const;  // "cuda:0,cuda:1"
};

// A weight that lives on one device.
std::shared_ptr<const PlacedWeight> MakeWhole(std::shared_ptr<const DeviceWeight> weight);

// Columns [begin, end) of a weight, or rows.
struct ColumnSpan {
  int64_t begin = 0;
  int64_t end = 0;
};

// Splits N columns into at most `parts` spans of nearly the same width, the last one ragged.
// Borders are multiples of 128, which kernels like best, or of 64 ... 8 where that would leave a
// device with more than a sixteenth above an equal share. Fewer spans when N < 8 x parts. `block`:
// columns that share a scale; no border is within a block.
std::vector<ColumnSpan> SplitColumns(int64_t n, int64_t parts, int64_t block = 1);

// Splits the columns of gate and of up and the rows of down of a gated MLP, alike for all three
// whatever their groups: borders are multiples of 128, and there are fewer spans when there are
// fewer such multiples.
std::vector<ColumnSpan> SplitMlp(int64_t count, int64_t parts);

// Copies columns with their zero points, scales and bias to a weight of their own. `span` is one
// that SplitColumns makes.
HostWeight CopyColumns(const HostWeight& weight, ColumnSpan span);

// Whether the weight can be partitioned at these rows: it has no order, factor or transform, and no
// border is within a group.
bool CanPartitionRows(const HostWeight& weight, absl::Span<const ColumnSpan> spans);

// Copies rows with their zero points and scales to a weight of their own; the rows from 0 have the
// bias. CanPartitionRows holds.
HostWeight CopyRows(const HostWeight& weight, ColumnSpan span);

// How a weight lies on several devices.
enum class Placing : uint8_t {
  kWhole,    // whole on each
  kColumns,  // partitioned by columns with SplitColumns
  // A gated MLP, partitioned with SplitMlp: gate and up by columns, down by rows. As kColumns where
  // blocks of columns or groups do not allow it.
  kMlpColumns,
  kMlpRows,
};

// The bytes of one part of a weight.
struct PartBytes {
  Device* device = nullptr;
  int64_t copied = 0;  // elements that are copied out for it; 0: it is the whole weight
  int64_t bytes = 0;
  bool exact = true;  // false: an upper bound, because the weight lacks scales that decide it
};
// Measures the parts that PlaceWeight makes of a weight, which may lack its codes. Fails as
// PreparedBytes.
absl::StatusOr<std::vector<PartBytes>> MeasurePlaced(const HostWeight& weight,
                                                     absl::Span<Device* const> devices,
                                                     Placing placing);

// The bytes of a weight's parts on the host, whether its codes are there or not.
int64_t HostBytes(const HostWeight& weight);

// An upper bound of the bytes of a whole weight, which may lack its codes, on such a device. Fails
// as PreparedBytes.
absl::StatusOr<int64_t> MeasureMost(const HostWeight& weight, const DeviceInfo& device);

// The memory of a model's weights on each device, where other processes may map it.
using Arenas = std::map<const Device*, std::shared_ptr<WeightArena>>;

// Puts the weight on the devices, one or more, at the same time: into the arena of a device that has
// one. Blocks. RESOURCE_EXHAUSTED naming
// the device that has no room; other errors as PrepareWeight, of the first device that has one. On
// an error nothing stays allocated on any of them. `memory`: as of PrepareWeight.
absl::StatusOr<std::shared_ptr<const PlacedWeight>> PlaceWeight(const HostWeight& weight,
                                                                absl::Span<Device* const> devices,
                                                                Placing placing,
                                                                const Arenas& arenas = {},
                                                                PackMemory* memory = nullptr);

// The place of an expert in an expert-parallel stack.
struct ExpertPlace {
  size_t shard = 0;    // among WeightStack::shards
  int32_t number = 0;  // in that shard

  friend bool operator==(const ExpertPlace&, const ExpertPlace&) = default;
};

// One or more experts, by number. Alike: same K, N and scheme, all with a bias or all without,
// the same columns or rows on the same devices, or expert parallel: each whole on one device. Scale
// octaves may differ, and with them the layouts. Immutable once made; shares its experts with the
// model that they are weights of.
struct WeightStack {
  std::string path;  // "model.layers.0.mlp.experts.*.up_proj"; empty for a stack of one
  std::vector<std::shared_ptr<const PlacedWeight>> experts;
  // Only for an expert-parallel stack: the experts of each device as a stack of their own, and the
  // place of each expert. Else both are empty.
  std::vector<std::shared_ptr<const WeightStack>> shards;
  std::vector<ExpertPlace> places;

  // The shape of every expert. Its scale_octaves are those of the first expert.
  const WeightShape& shape() const { return experts.front()->shape; }
  bool has_bias() const { return experts.front()->has_bias; }
  bool partitioned() const { return experts.front()->partitioned(); }
  bool expert_parallel() const { return !shards.empty(); }
  // The bytes of all, on all devices.
  int64_t bytes() const {
    int64_t bytes = 0;
    for (const auto& expert : experts) bytes += expert->bytes();
    return bytes;
  }
  std::string devices() const;  // "cuda:0,cuda:1"
};

// The stack of these weights in the order of their numbers; `expert_parallel`: each on one device,
// which may differ. FAILED_PRECONDITION naming the stack and the lowest number that is missing, or
// the first expert that differs from the lowest one, in what, got and expected.
absl::StatusOr<std::shared_ptr<const WeightStack>> MakeStack(
    std::string path, const std::map<int64_t, std::shared_ptr<const PlacedWeight>>& experts,
    bool expert_parallel = false);

// A weight as a stack of its own, for operations that take either.
std::shared_ptr<const WeightStack> StackOfOne(std::shared_ptr<const PlacedWeight> weight);

}  // namespace awqd::model
