// Opening a checkpoint's files, and reading linears of them.
#include "kernels/checkpoint/checkpoint.h"

#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/host_memory.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/checkpoint_files.h"
#include "kernels/checkpoint/comfy_layers.h"
#include "kernels/checkpoint/containers/gguf.h"

namespace awqd::model {
namespace {

// How the paths of fused projections end.
constexpr absl::string_view kFusedQkv = ".qkv_proj", kFusedGateUp = ".gate_up_proj";
constexpr absl::string_view kHead = ".lm_head";
// How those end whose inputs, or whose outputs, are the model's hidden states.
constexpr absl::string_view kReaders[] = {
    ".q_proj", ".k_proj", ".v_proj", kFusedQkv,          ".gate_proj",     ".up_proj", kFusedGateUp,
    ".fc1",    ".w1",     ".w3",     ".query_key_value", ".dense_h_to_4h", kHead};
constexpr absl::string_view kWriters[] = {".o_proj", ".out_proj", ".down_proj",
                                          ".fc2",    ".w2",       ".dense_4h_to_h"};

// At least so many bytes, of any contents.
void Reserve(int64_t bytes, std::vector<uint8_t>* scratch) {
  if (static_cast<int64_t>(scratch->size()) >= bytes) return;
  std::vector<uint8_t>().swap(*scratch);  // first free, then allocate
  scratch->reserve(bytes);
  AdviseHugePages(scratch->data(), bytes);
  scratch->resize(bytes);
}

}  // namespace

absl::StatusOr<Checkpoint> Checkpoint::Open(const RepositoryRoot& root, absl::string_view name,
                                            const std::atomic<bool>* cancelled) {
  Checkpoint out;
  out.name_ = std::string(name);
  out.cancelled_ = cancelled;
  const FolderSnapshot folder(root, name, &out.read_);
  AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> gguf, FindGguf(folder, name));
  AWQD_RETURN_IF_ERROR(gguf.empty() ? out.OpenFolder(folder) : out.OpenGguf(folder, gguf));
  return out;
}

absl::Status Checkpoint::OpenGguf(const FileSource& root, const std::vector<std::string>& paths) {
  AWQD_ASSIGN_OR_RETURN(TensorFiles opened, OpenGgufFiles(root, paths, cancelled_));
  files_ = std::move(opened.files);
  tensors_ = std::move(opened.tensors);
  std::vector<const TensorMap*> tensors;
  for (const auto& file : files_) tensors.push_back(&file->tensors());
  found_ = FormatOfGguf(opened.architecture, tensors);
  AWQD_ASSIGN_OR_RETURN(rules_, LinearRules::Make(found_.config, cancelled_));
  return FindLinears();
}

absl::Status Checkpoint::OpenFolder(const FileSource& root) {
  const auto config = ReadConfigSettings(root, name_);
  if (absl::IsNotFound(config.status())) return OpenAlone(root, config.status());
  if (!config.ok()) return config.status();
  const std::optional<QuantSettings>& own = *config;
  std::optional<QuantSettings> side;
  if (!own) {
    AWQD_ASSIGN_OR_RETURN(side, ReadSideSettings(root, name_));
  }
  if (!own && !side) {
    const absl::Status nothing =
        Invalid(name_, "/", kConfigFile, ": quantization_config: got nothing, expected it here ",
                "or a quant_config.json, quantize_config.json or ", kModelOptFile,
                " beside it (not a quantised checkpoint?)");
    return OpenAlone(root, nothing);
  }
  // Settings that no format reads are told first: the files may be of any kind.
  absl::Status status = FindRules(own ? *own : *side);
  if (!own && !status.ok()) return status;
  absl::StatusOr<TensorFiles> opened = OpenTensorFiles(root, name_, cancelled_);
  if (!opened.ok()) return status.ok() ? opened.status() : status;
  files_ = std::move(opened->files);
  tensors_ = std::move(opened->tensors);
  respelled_ = std::move(opened->respelled);
  if (status.ok()) status = FindLinears();
  if (own) status = ChooseSettings(root, *own, status);
  AddNote(opened->note, &found_.config.note);
  const auto is_fused = [](const LinearLocation& linear) {
    return absl::EndsWith(linear.path, kFusedQkv);
  };
  const auto needs_features = [](const LinearLocation& linear) {
    return linear.rule->format->needs_features;
  };
  const bool features = absl::c_any_of(linears_, needs_features);
  if (features || absl::c_any_of(linears_, is_fused)) attention_ = ReadAttentionRows(root, name_);
  if (features) {
    hidden_size_ = ReadSize(root, name_, "hidden_size");
    vocab_size_ = ReadSize(root, name_, "vocab_size");
  }
  return status;
}

absl::Status Checkpoint::OpenAlone(const FileSource& root, const absl::Status& nothing) {
  const bool file = absl::EndsWith(name_, kSafetensorsExtension) && root.OpenFile(name_).ok();
  absl::StatusOr<TensorFiles> opened = OpenTensorFiles(root, name_, cancelled_);
  if (!opened.ok()) return file || absl::IsUnavailable(opened.status()) ? opened.status() : nothing;
  AWQD_ASSIGN_OR_RETURN(auto found,
                        FindComfyLayers(opened->files, opened->tensors, file, cancelled_));
  if (!found) return NameFamily(root, name_, nothing, cancelled_);
  files_ = std::move(opened->files);
  tensors_ = std::move(opened->tensors);
  respelled_ = std::move(opened->respelled);
  found_ = *std::move(found);
  by_path_ = true;
  AWQD_ASSIGN_OR_RETURN(rules_, LinearRules::Make(found_.config, cancelled_));
  const absl::Status status = FindLinears();
  AddNote(opened->note, &found_.config.note);
  return status;
}

// Settings beside config.json are for this model where config.json still has those of the model
// that it was made from. The tensors tell: those settings are better whose rules match more of the
// linears that can be read, and after that those that leave fewer linears unread. A linear that is
// read by its tensors alone says nothing.
absl::Status Checkpoint::ChooseSettings(const FileSource& root, const QuantSettings& own,
                                        const absl::Status& status) {
  if (absl::IsUnavailable(status)) return status;
  if (status.ok() && absl::StartsWith(found_.quant_method, "modelopt")) return status;
  const absl::StatusOr<std::optional<QuantSettings>> side =
      ReadSideSettings(root, name_, /*modelopt_alone=*/status.ok());
  if (!side.ok() || !*side) return status;
  const auto rate = [this] {
    return std::pair(static_cast<int64_t>(linears_.size()) - unmatched_,
                     -static_cast<int64_t>(unserved_.size()));
  };
  const auto rate_of_own = rate();
  if (FindLinearsOf(**side).ok() && (!status.ok() || rate() > rate_of_own)) {
    AddNote(absl::StrCat(own.place, " has no effect: the tensors are those of ", (*side)->place),
            &found_.config.note);
    return absl::OkStatus();
  }
  return FindLinearsOf(own);
}

absl::Status Checkpoint::FindRules(const QuantSettings& settings) {
  absl::StatusOr<FoundFormat> found = FindFormat(settings.settings);
  if (!found.ok()) return Prefixed(settings.place, found.status());
  found_ = *std::move(found);
  absl::StatusOr<LinearRules> rules = LinearRules::Make(found_.config, cancelled_);
  if (!rules.ok()) return Prefixed(settings.place, rules.status());
  added_.clear();
  rules_ = *std::move(rules);
  return absl::OkStatus();
}

absl::Status Checkpoint::FindLinearsOf(const QuantSettings& settings) {
  AWQD_RETURN_IF_ERROR(FindRules(settings));
  return FindLinears();
}

std::string ToString(const Remarks& remarks) {
  return absl::StrJoin(remarks, "; ", [](std::string* out, const auto& remark) {
    absl::StrAppend(out, remark.second,
                    remark.second == 1 ? " linear: " : " linears: ", remark.first);
  });
}

int Checkpoint::ignored_tensors() const {
  return static_cast<int>(
      absl::c_count_if(tensors_, [](const auto& entry) { return !entry.second.quantised(); }));
}

int64_t Checkpoint::total_bytes() const {
  int64_t bytes = 0;
  for (const LinearLocation& linear : linears_) bytes += linear.bytes;
  return bytes;
}

std::vector<std::vector<int64_t>> Checkpoint::FindFused(const LinearLocation& linear) const {
  std::vector<std::vector<int64_t>> out;
  const std::vector<int64_t>& shape = linear.codes().info->shape;
  if (shape.size() != 2 || !linear.slice_of.empty()) return out;
  const int64_t n = shape[0];
  if (absl::EndsWith(linear.path, kFusedGateUp) && n % 2 == 0) out = {{n / 2, n / 2}};
  if (!absl::EndsWith(linear.path, kFusedQkv)) return out;
  for (const AttentionRows& rows : attention_) {
    if (rows.q + rows.k + rows.v == n) out.push_back({rows.q, rows.k, rows.v});
  }
  if (out.empty()) return out;
  // Some models lay q, k and v of some heads behind one another, and then those of the next.
  for (const AttentionRows& rows : attention_) {
    for (int64_t chunks = 2; chunks <= rows.key_value_heads; ++chunks) {
      if (rows.q + rows.k + rows.v != n || rows.key_value_heads % chunks != 0) continue;
      out.emplace_back(chunks, n / chunks);
    }
  }
  return out;
}

void Checkpoint::DescribeCodes(const LinearLocation& linear, absl::string_view stored,
                               TensorView* codes) const {
  const Format& format = *linear.rule->format;
  codes->fused = FindFused(linear);
  const auto is_one_of = [&](absl::Span<const absl::string_view> endings) {
    return absl::c_any_of(endings, [&](absl::string_view ending) {
      return absl::EndsWith(absl::StrCat(".", stored), ending);
    });
  };
  if (is_one_of(kReaders)) codes->in_features = hidden_size_;
  if (is_one_of(kWriters)) codes->out_features = hidden_size_;
  if (is_one_of({kHead})) codes->out_features = vocab_size_;
  // Some attention reads more than hidden states, and then config.json tells other out features.
  for (const auto& [ending, rows] : {std::pair(".q_proj", &AttentionRows::q),
                                     {".k_proj", &AttentionRows::k},
                                     {".v_proj", &AttentionRows::v}}) {
    if (is_one_of({ending}) && attention_.size() == 1) codes->out_features = attention_[0].*rows;
  }
  if (format.metadata.empty()) return;
  const std::string name = TensorName(format, stored, format.metadata);
  for (const auto& file : files_) {
    codes->metadata = std::string(file->FindMetadata(name));
    if (!codes->metadata.empty()) return;
  }
}

absl::StatusOr<HostWeight> Checkpoint::Decode(const LinearLocation& linear, bool codes,
                                              std::vector<uint8_t>* scratch,
                                              Remarks* remarks) const {
  const Format& format = *linear.rule->format;
  Reserve(codes ? linear.bytes : linear.bytes - linear.codes().info->bytes(), scratch);
  // The path in the file. That of a slice is another.
  const std::string& stored = linear.slice_of.empty() ? linear.path : linear.slice_of;
  LinearTensors tensors;
  int64_t at = 0;
  for (const auto& [suffix, location] : linear.tensors) {
    const int64_t size = location.info->bytes();
    TensorView& view = tensors[suffix];
    view = {location.info->dtype, location.info->shape, {}, linear.experts};
    if (suffix == format.suffixes.front()) DescribeCodes(linear, stored, &view);
    if (!codes && suffix == format.suffixes.front()) {
      view.bytes = absl::Span<const uint8_t>(nullptr, size);
      continue;
    }
    const auto bytes = absl::MakeSpan(*scratch).subspan(at, size);
    const absl::Status status = location.file->Read(*location.info, bytes, cancelled_);
    if (!status.ok()) {
      return absl::Status(status.code(),
                          absl::StrCat(status.message(), " (tensor ",
                                       Quoted(TensorName(format, stored, suffix)), ")"));
    }
    view.bytes = bytes;
    at += size;
  }
  absl::StatusOr<HostWeight> out = format.Decode(linear.rule->settings, tensors);
  if (out.ok()) {
    if (remarks == nullptr || format.remark == nullptr) return out;
    const std::string remark = format.remark(linear.rule->settings, tensors);
    if (!remark.empty()) ++(*remarks)[remark];
    return out;
  }
  return Prefixed(
      absl::StrCat(linear.codes().file->file().shown_name(), ": weight ", Quoted(linear.path),
                   linear.slice_of.empty()
                       ? ""
                       : absl::StrCat(" (a slice of ", Quoted(linear.slice_of), ")")),
      out.status());
}

}  // namespace awqd::model
