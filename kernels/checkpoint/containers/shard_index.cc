// Parsing an index by its events.
#include "kernels/checkpoint/containers/shard_index.h"

#include <algorithm>
#include <bit>

#include "absl/hash/hash.h"
#include "absl/strings/match.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/containers/json.h"
#include "kernels/checkpoint/containers/safetensors.h"
#include "kernels/checkpoint/repository_root.h"

namespace awqd::model {
namespace {

constexpr int64_t kMaxIndexBytes = 64 << 20;
constexpr int kMaxIndexDepth = 8;
constexpr int64_t kPieceBytes = 256 << 10;
constexpr size_t kBlockBytes = 256 << 10;
constexpr absl::string_view kWeightMap = "weight_map";
// The headers of all files may have as many, so that no index of more can be right.
constexpr SafetensorsLimits kLimits;

}  // namespace

class IndexEvents final : public JsonEvents {
 public:
  IndexEvents(ShardIndex* index, const std::atomic<bool>* cancelled)
      : JsonEvents(kMaxIndexDepth, cancelled), index_(*index) {}

  absl::Status Finish() const {
    if (!found_) return NoMap();
    if (index_.size() > 0) return absl::OkStatus();
    return Invalid(kWeightMap, ": got no tensor, expected some");
  }

 private:
  static absl::Status NoMap() {
    return Invalid(kWeightMap, ": expected an object of tensor -> file");
  }
  bool in_map() const { return in_map_ && depth_ == 2; }

  // A value that is no text. Only the document and the map have to be of a kind.
  absl::Status Check(absl::string_view got, bool object) const {
    if (depth_ == 0 && !object) return Invalid("got ", got, ", expected an object");
    if (depth_ == 1 && in_map_ && !object) return NoMap();
    if (!in_map()) return absl::OkStatus();
    return Invalid(kWeightMap, ": tensor ", Quoted(tensor_), ": got ", got,
                   ", expected a file name");
  }

  absl::Status StartObject() override {
    AWQD_RETURN_IF_ERROR(Check("an object", true));
    ++depth_;
    return absl::OkStatus();
  }
  absl::Status EndObject() override {
    --depth_;
    return absl::OkStatus();
  }
  absl::Status StartArray() override {
    AWQD_RETURN_IF_ERROR(Check("an array", false));
    ++depth_;
    return absl::OkStatus();
  }
  absl::Status EndArray() override { return EndObject(); }

  absl::StatusOr<bool> IsNewKey(const std::string& key) override {
    if (!in_map()) return JsonEvents::IsNewKey(key);
    if (key.size() > kLimits.max_name_bytes) {
      return Invalid(kWeightMap, ": tensor ", Quoted(key), ": name: got ", key.size(),
                     " bytes, expected at most ", kLimits.max_name_bytes);
    }
    if (static_cast<int64_t>(index_.size()) == kLimits.max_tensors) {
      return Invalid(kWeightMap, ": got more than ", kLimits.max_tensors, " tensors, the limit");
    }
    return index_.AddTensor(key);
  }

  absl::Status Key(absl::string_view key) override {
    if (depth_ == 1) {
      in_map_ = key == kWeightMap;
      found_ |= in_map_;
    }
    if (in_map()) tensor_ = std::string(key);
    return absl::OkStatus();
  }

  absl::Status Scalar(const uint64_t* number, const std::string* text) override {
    if (text == nullptr || !in_map()) {
      return Check(number != nullptr ? "a number"
                   : text != nullptr ? "a string"
                                     : "a plain value",
                   false);
    }
    if (!IsPlainFileName(*text) || !absl::EndsWith(*text, ".safetensors")) {
      return Invalid(kWeightMap, ": tensor ", Quoted(tensor_), ": got ", Quoted(*text),
                     ", expected the name of a .safetensors file in the same directory");
    }
    return index_.SetFile(*text);
  }

  ShardIndex& index_;
  int depth_ = 0;        // objects and lists around the place that is read
  bool in_map_ = false;  // of the members of the document it is in weight_map
  bool found_ = false;
  std::string tensor_;
};

ShardIndex::ShardIndex(size_t most) : slots_(std::bit_ceil(2 * most)) {}

ShardIndex::Entry ShardIndex::operator[](size_t i) const {
  return {NameOf(tensors_[i]), file_of_[tensors_[i].file]->first};
}

std::vector<std::string> ShardIndex::file_names() const {
  std::vector<std::string> out;
  for (const auto& [name, number] : files_) out.push_back(name);
  return out;
}

bool ShardIndex::AddTensor(absl::string_view name) {
  // absl::Hash has a seed of each process: nobody can write names that share their slots.
  size_t slot = absl::HashOf(name) & (slots_.size() - 1);
  for (; slots_[slot] != 0; slot = (slot + 1) & (slots_.size() - 1)) {
    if (NameOf(tensors_[slots_[slot] - 1]) == name) return false;
  }
  if (blocks_.empty() || blocks_.back().capacity() - blocks_.back().size() < name.size()) {
    blocks_.emplace_back().reserve(kBlockBytes);
  }
  std::string& block = blocks_.back();
  tensors_.push_back({block.data() + block.size(), static_cast<uint16_t>(name.size()), 0});
  block.append(name.data(), name.size());
  slots_[slot] = static_cast<uint32_t>(tensors_.size());
  return true;
}

absl::Status ShardIndex::SetFile(absl::string_view name) {
  auto it = files_.find(name);
  if (it == files_.end()) {
    if (files_.size() == kMaxShards) {
      return Invalid(kWeightMap, ": got more than ", kMaxShards, " shards, expected at most ",
                     kMaxShards);
    }
    it = files_.emplace(std::string(name), static_cast<uint16_t>(files_.size())).first;
    file_of_.push_back(it);
  }
  tensors_.back().file = it->second;
  return absl::OkStatus();
}

absl::StatusOr<ShardIndex> ShardIndex::Read(const File& file, const std::atomic<bool>* cancelled) {
  constexpr int64_t kLeastEntryBytes = 18;  // "":".safetensors",
  if (file.size() > kMaxIndexBytes) {
    return Invalid(file.shown_name(), ": got ", file.size(), " bytes, expected at most ",
                   kMaxIndexBytes);
  }
  AWQD_RETURN_IF_ERROR(file.CheckNoLfsPointer());
  ShardIndex out(std::min(kLimits.max_tensors, file.size() / kLeastEntryBytes + 1));
  std::vector<uint8_t> piece(kPieceBytes);
  int64_t at = 0;
  const auto next = [&]() -> absl::StatusOr<absl::string_view> {
    const auto part = absl::MakeSpan(piece).first(std::min(kPieceBytes, file.size() - at));
    AWQD_RETURN_IF_ERROR(file.ReadAt(at, part, cancelled));
    at += static_cast<int64_t>(part.size());
    return absl::string_view(reinterpret_cast<const char*>(part.data()), part.size());
  };
  IndexEvents events(&out, cancelled);
  absl::Status status = ParseJson(next, &events);
  if (status.ok()) status = events.Finish();
  if (!status.ok()) return Prefixed(file.shown_name(), status);
  std::vector<uint32_t>().swap(out.slots_);  // frees it
  return out;
}

}  // namespace awqd::model
