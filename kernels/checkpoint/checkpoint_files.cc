// Finding and opening the files, and choosing the file of each tensor.
#include "kernels/checkpoint/checkpoint_files.h"

#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/comfy_layers.h"
#include "kernels/checkpoint/containers/gguf.h"
#include "kernels/checkpoint/containers/safetensors.h"
#include "kernels/checkpoint/containers/shard_index.h"
#include "kernels/checkpoint/quant_settings.h"

namespace awqd::model {
namespace {

constexpr absl::string_view kWholeFile = "model.safetensors";
constexpr absl::string_view kExtension = kSafetensorsExtension;
constexpr absl::string_view kGgufExtension = ".gguf";
constexpr absl::string_view kProjector = "clip";  // general.architecture of a projector

std::string PathOf(absl::string_view model, absl::string_view file) {
  return absl::StrCat(model, "/", file);
}

// --- safetensors ---

absl::StatusOr<std::optional<ShardIndex>> ReadIndex(const FileSource& root, absl::string_view model,
                                                    const std::atomic<bool>* cancelled) {
  const absl::StatusOr<File> file = root.OpenFile(PathOf(model, kIndexFile));
  if (absl::IsNotFound(file.status())) return std::optional<ShardIndex>();
  if (!file.ok()) return file.status();
  return ShardIndex::Read(*file, cancelled);
}

// One file under several names would take memory for each of them.
absl::Status CheckNotOpen(const File& file,
                          absl::Span<const std::shared_ptr<const TensorFile>> open) {
  for (const auto& other : open) {
    if (!file.SameFileAs(other->file())) continue;
    return Invalid(other->file().shown_name(), ": got the same file as ", file.shown_name(),
                   ", expected each shard once");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> NamesInDirectory(const FileSource& root,
                                                          absl::string_view model) {
  AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> names, root.ListDirectory(model));
  std::vector<std::string> out;
  bool other = false;
  for (const std::string& name : names) {
    if (absl::StartsWith(name, ".")) continue;
    if (absl::EndsWith(name, kExtension)) out.push_back(name);
    other |= absl::EndsWith(name, ".bin") || absl::EndsWith(name, ".pt");
  }
  if (out.size() > kMaxShards) {
    return Invalid(model, ": got ", out.size(), " shards, expected at most ", kMaxShards);
  }
  if (!out.empty()) return out;
  return Invalid(model, ": got no *.safetensors file, expected at least one",
                 other ? " (.bin and .pt files are not read: convert them)" : "");
}

// Whether the index is one of another model, whose files were never here: it came with a copy of
// the settings.
absl::StatusOr<bool> IsOfAnotherModel(const FileSource& root, absl::string_view model,
                                      const std::vector<std::string>& indexed) {
  AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> names, root.ListDirectory(model));
  const auto there = [&](absl::string_view name) { return absl::c_linear_search(names, name); };
  return there(kWholeFile) && absl::c_none_of(indexed, there);
}

// Each tensor of the index, in the file that it says.
absl::Status AddIndexed(absl::string_view model, const ShardIndex& index,
                        const std::atomic<bool>* cancelled, TensorFiles* out) {
  std::map<absl::string_view, const TensorFile*> by_path;
  for (const auto& file : out->files) by_path.emplace(file->file().name(), file.get());
  for (size_t i = 0; i < index.size(); ++i) {
    AWQD_RETURN_IF_ERROR(CheckCancelled(cancelled));
    const auto [tensor, name] = index[i];
    const TensorFile* const file = by_path.at(PathOf(model, name));
    if (const auto it = file->tensors().find(tensor); it != file->tensors().end()) {
      out->tensors.emplace(it->first, TensorLocation{file, &it->second});
      continue;
    }
    const auto other = absl::c_find_if(
        out->files, [name = tensor](const auto& some) { return some->tensors().contains(name); });
    return Invalid(
        PathOf(model, kIndexFile), ": tensor ", Quoted(tensor), ": expected in ", Quoted(name),
        other == out->files.end() ? ", which does not hold it"
                                  : absl::StrCat(", found in ", (*other)->file().shown_name()));
  }
  return absl::OkStatus();
}

// The tensors that no index names.
absl::Status AddOthers(const std::atomic<bool>* cancelled, TensorFiles* out) {
  const auto indexed = out->tensors;
  int64_t copies = 0, doubtful = 0;
  for (const auto& file : out->files) {
    for (const auto& [name, info] : file->tensors()) {
      AWQD_RETURN_IF_ERROR(CheckCancelled(cancelled));
      const auto [it, fresh] = out->tensors.emplace(name, TensorLocation{file.get(), &info});
      if (fresh || it->second.info == &info) continue;
      if (indexed.contains(name)) {
        ++copies;
        continue;
      }
      doubtful += it->second.also_in == nullptr ? 1 : 0;
      it->second.also_in = file.get();
    }
  }
  if (copies > 0) {
    AddNote(absl::StrCat(copies, " tensors have no effect: ", kIndexFile,
                         " names other files for their names"),
            &out->note);
  }
  if (doubtful > 0) {
    AddNote(absl::StrCat(doubtful,
                         " tensors are in two files, and no index says which of the two counts"),
            &out->note);
  }
  return absl::OkStatus();
}

// --- GGUF ---

// "tiny-00002-of-00003.gguf" is part 2 of 3 of "tiny".
struct PartName {
  std::string model;  // with the path before it
  int part = 0;       // from 1 on
  int parts = 0;

  std::string Name(int which) const {
    return absl::StrFormat("%s-%05d-of-%05d%s", model, which, parts, kGgufExtension);
  }
};

std::optional<PartName> ParsePartName(absl::string_view name) {
  constexpr size_t kDigits = 5;
  constexpr absl::string_view kBetween = "-of-";
  constexpr size_t kBytes = 1 + kDigits + kBetween.size() + kDigits;
  if (!absl::ConsumeSuffix(&name, kGgufExtension) || name.size() <= kBytes) return std::nullopt;
  absl::string_view end = name.substr(name.size() - kBytes);
  PartName out = {.model = std::string(name.substr(0, name.size() - kBytes))};
  const auto number = [&](int* to) {
    const absl::string_view digits = end.substr(0, kDigits);
    end.remove_prefix(kDigits);
    return absl::c_all_of(digits, absl::ascii_isdigit) && absl::SimpleAtoi(digits, to);
  };
  if (!absl::ConsumePrefix(&end, "-") || !number(&out.part) ||
      !absl::ConsumePrefix(&end, kBetween) || !number(&out.parts) || out.part < 1 ||
      out.part > out.parts || static_cast<size_t>(out.parts) > kMaxShards) {
    return std::nullopt;
  }
  return out;
}

// NOT_FOUND where a file has no layers that ComfyUI quantised. A file that cannot be read is a model
// all the same, whose load says what is wrong with it.
absl::Status CheckComfyFile(File file) {
  const std::string name = file.shown_name();
  const absl::StatusOr<TensorFile> tensors = OpenSafetensors(std::move(file));
  if (!tensors.ok() || HasComfyLayers(*tensors)) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat(
      name, ": got no layers that ComfyUI quantised, expected some in a file without a ",
      kConfigFile));
}

// The paths of all parts, from that of one of them.
std::vector<std::string> PathsOfParts(const std::string& path) {
  const std::optional<PartName> name = ParsePartName(path);
  if (!name) return {path};
  std::vector<std::string> out;
  for (int part = 1; part <= name->parts; ++part) out.push_back(name->Name(part));
  return out;
}

absl::StatusOr<bool> IsProjector(const FileSource& root, const std::string& path) {
  AWQD_ASSIGN_OR_RETURN(const File file, root.OpenFile(path));
  AWQD_ASSIGN_OR_RETURN(const std::string architecture, ReadGgufArchitecture(file));
  return architecture == kProjector;
}

// The first file of the one model among a directory's GGUF files, which may have projectors beside
// it. `names` has only the first part of a model in parts.
absl::StatusOr<std::string> ChooseGguf(const FileSource& root, absl::string_view model,
                                       const std::vector<std::string>& names) {
  if (names.size() == 1) return names[0];
  std::vector<std::string> models;
  for (const std::string& name : names) {
    // A file that cannot be read counts: its own error is not the one to report here.
    const absl::StatusOr<bool> projector = IsProjector(root, PathOf(model, name));
    if (!projector.ok() || !*projector) models.push_back(name);
  }
  if (models.size() == 1) return models[0];
  const std::vector<std::string>& several = models.empty() ? names : models;
  return Invalid(model, ": got ", several.size(), " *.gguf files, such as ", Quoted(several[0]),
                 " and ", Quoted(several[1]), ", expected one, or a ", kConfigFile);
}

}  // namespace

absl::StatusOr<TensorFiles> OpenTensorFiles(const FileSource& root, absl::string_view model,
                                            const std::atomic<bool>* cancelled) {
  TensorFiles out;
  AWQD_ASSIGN_OR_RETURN(std::optional<ShardIndex> index, ReadIndex(root, model, cancelled));
  std::vector<std::string> names;
  if (index) {
    names = index->file_names();
    AWQD_ASSIGN_OR_RETURN(const bool other, IsOfAnotherModel(root, model, names));
    if (other) {
      out.note = absl::StrCat(kIndexFile, " has no effect: none of its files is here");
      index.reset();
    }
  }
  const bool alone = absl::EndsWith(model, kExtension) && root.OpenFile(model).ok();
  if (!index && !alone) {
    AWQD_ASSIGN_OR_RETURN(names, NamesInDirectory(root, model));
  }
  std::vector<std::string> paths;
  for (const std::string& name : names) paths.push_back(PathOf(model, name));
  if (alone) paths = {std::string(model)};
  SafetensorsLimits left = {.cancelled = cancelled};  // what all files together may claim
  for (const std::string& path : paths) {
    absl::StatusOr<File> file = root.OpenFile(path);
    if (absl::IsNotFound(file.status())) {
      return Invalid(model, ": shard ", Quoted(path.substr(model.size() + 1)),
                     " is missing, expected every file that ", kIndexFile, " names");
    }
    if (!file.ok()) return file.status();
    AWQD_RETURN_IF_ERROR(CheckNotOpen(*file, out.files));
    AWQD_ASSIGN_OR_RETURN(TensorFile shard, OpenSafetensors(*std::move(file), left));
    left.max_header_bytes -= shard.header_bytes();
    left.max_tensors -= static_cast<int64_t>(shard.tensors().size());
    out.files.push_back(std::make_shared<const TensorFile>(std::move(shard)));
  }
  if (index) AWQD_RETURN_IF_ERROR(AddIndexed(model, *index, cancelled, &out));
  AWQD_RETURN_IF_ERROR(AddOthers(cancelled, &out));
  RespellTensors(&out.tensors, &out.respelled);
  return out;
}

absl::Status NameFamily(const FileSource& root, absl::string_view model, const absl::Status& error,
                        const std::atomic<bool>* cancelled) {
  const absl::StatusOr<TensorFiles> opened = OpenTensorFiles(root, model, cancelled);
  if (!opened.ok()) return absl::IsUnavailable(opened.status()) ? opened.status() : error;
  const auto [family, tensor] = FindFamily(opened->tensors);
  if (family == nullptr) return error;
  const std::string what =
      absl::StrCat("tensor ", Quoted(tensor), " marks a quantisation of ", family->name);
  if (family->read) {
    return absl::Status(error.code(), absl::StrCat(error.message(), ": ", what,
                                                   ", which needs its settings to be read"));
  }
  return absl::UnimplementedError(
      absl::StrCat(model, ": ", what,
                   family->alone ? ", which is read from a file of its own, FILE.safetensors"
                                 : ", which is not read"));
}

absl::StatusOr<std::vector<std::string>> FindGguf(const FileSource& root, absl::string_view model) {
  const absl::StatusOr<std::vector<std::string>> names = root.ListDirectory(model);
  if (!names.ok()) {
    if (!absl::EndsWith(model, kGgufExtension)) return std::vector<std::string>();
    return PathsOfParts(std::string(model));
  }
  std::vector<std::string> found;
  for (const std::string& name : *names) {
    if (name.front() == '.' || !absl::EndsWith(name, kGgufExtension)) continue;
    const std::optional<PartName> part = ParsePartName(name);
    const bool follows = part && part->part > 1 && absl::c_linear_search(*names, part->Name(1));
    if (!follows) found.push_back(name);
  }
  const bool safetensors = absl::c_any_of(
      *names, [](absl::string_view name) { return absl::EndsWith(name, kExtension); });
  const bool other = safetensors && absl::c_linear_search(*names, kConfigFile);
  if (found.empty() || other) return std::vector<std::string>();
  AWQD_ASSIGN_OR_RETURN(const std::string first, ChooseGguf(root, model, found));
  std::vector<std::string> out = PathsOfParts(PathOf(model, first));
  for (const std::string& path : out) {
    const std::string name = path.substr(model.size() + 1);
    if (absl::c_linear_search(*names, name)) continue;
    return Invalid(model, ": part ", Quoted(name), " is missing, expected all ", out.size(),
                   " parts of the model");
  }
  return out;
}

absl::StatusOr<TensorFiles> OpenGgufFiles(const FileSource& root,
                                          const std::vector<std::string>& paths,
                                          const std::atomic<bool>* cancelled) {
  TensorFiles out;
  GgufLimits left = {.cancelled = cancelled};  // what all parts together may claim
  for (size_t i = 0; i < paths.size(); ++i) {
    absl::StatusOr<File> file = root.OpenFile(paths[i]);
    if (absl::IsNotFound(file.status()) && i > 0) {
      return Invalid(paths[0], ": part ", Quoted(paths[i]), " is missing, expected all ",
                     paths.size(), " parts of the model");
    }
    if (!file.ok()) return file.status();
    AWQD_ASSIGN_OR_RETURN(GgufFile part, OpenGguf(*std::move(file), left));
    const std::string name = part.tensors.file().shown_name();
    if (part.parts != static_cast<int>(paths.size())) {
      return Invalid(name, ": metadata \"split.count\": got one of ", part.parts,
                     " files, expected ", paths.size() == 1 ? "a whole model" : "one of ",
                     paths.size() == 1 ? "" : absl::StrCat(paths.size()),
                     " (parts are named NAME-00001-of-00002.gguf)");
    }
    if (part.part != static_cast<int>(i)) {
      return Invalid(name, ": metadata \"split.no\": got ", part.part, ", expected ", i,
                     " by its name");
    }
    if (i == 0) out.architecture = part.architecture;
    left.max_header_bytes -= part.tensors.header_bytes();
    left.max_tensors -= static_cast<int64_t>(part.tensors.tensors().size());
    out.files.push_back(std::make_shared<const TensorFile>(std::move(part.tensors)));
  }
  AWQD_RETURN_IF_ERROR(AddOthers(cancelled, &out));
  return out;
}

absl::Status FindModel(const FileSource& root, absl::string_view model) {
  AWQD_ASSIGN_OR_RETURN(const std::vector<std::string> gguf, FindGguf(root, model));
  if (gguf.empty() && absl::EndsWith(model, kExtension)) {
    absl::StatusOr<File> file = root.OpenFile(model);
    if (file.ok()) return CheckComfyFile(*std::move(file));
  }
  if (gguf.empty()) return root.OpenFile(PathOf(model, kConfigFile)).status();
  if (gguf[0] != model && absl::c_linear_search(gguf, model)) {
    return absl::NotFoundError(absl::StrCat(Quoted(model), ": is a part of the model ",
                                            Quoted(gguf[0]), ", and no model of its own"));
  }
  return root.OpenFile(gguf[0]).status();
}

}  // namespace awqd::model
