// Finding the linears among a checkpoint's tensors, and what every tensor belongs to.
#include <iterator>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/checkpoint.h"
#include "kernels/checkpoint/experts.h"
#include "kernels/checkpoint/tensor_names.h"

namespace awqd::model {
namespace {

// The most rules that are tried of those that match a path, and of those that do not.
constexpr size_t kMaxTried = 64;

// Whether two rules decode a linear alike.
bool SameReading(const LinearRule& a, const LinearRule& b) {
  return a.format == b.format && a.settings == b.settings;
}

}  // namespace

// A path's tensors as a rule reads them.
struct LinearFit {
  LinearLocation linear;
  std::vector<TensorLocation*> entries;  // of its tensors
};

// The tensors of a checkpoint by the paths that their names begin with.
class PathTensors {
 public:
  using Tensors = std::map<absl::string_view, TensorLocation>;
  // `model` is for errors. All outlive this.
  PathTensors(const std::string& model, Tensors* tensors, const std::atomic<bool>* cancelled)
      : model_(model), tensors_(*tensors), cancelled_(cancelled) {}

  // Null where there is no tensor of that name.
  TensorLocation* Find(absl::string_view name) const {
    const auto it = tensors_.find(name);
    return it == tensors_.end() ? nullptr : &it->second;
  }

  // Companions without the tensor that marks a linear: a linear that lost its codes, unless only
  // one of several is there, which an unquantised module may well call "scales".
  bool HasCompanions(const Format& format, absl::string_view path) const {
    return absl::c_all_of(format.suffixes, [&](absl::string_view suffix) {
      return suffix == format.suffixes.front() || IsOptional(format, suffix) ||
             IsCommon(format, suffix) || Find(TensorName(format, path, suffix)) != nullptr;
    });
  }

  // Calls `visit` for each tensor beside the linear's codes, with its name behind the path and the
  // separator, until it returns an error. UNAVAILABLE once cancelled.
  absl::Status VisitBeside(
      absl::string_view path, absl::string_view separator,
      absl::FunctionRef<absl::Status(absl::string_view last, TensorLocation& entry)> visit) const {
    const std::string prefix = absl::StrCat(path, separator);
    for (auto it = tensors_.lower_bound(prefix);
         it != tensors_.end() && absl::StartsWith(it->first, prefix);) {
      AWQD_RETURN_IF_ERROR(CheckCancelled(cancelled_));
      const absl::string_view last = it->first.substr(prefix.size());
      const size_t dot = last.find('.');
      if (dot == last.npos || last.substr(0, dot) == "weight") {
        AWQD_RETURN_IF_ERROR(visit(last, it->second));
        ++it;
      } else {  // a module beneath: behind it, '/' being the character after '.'
        it = tensors_.lower_bound(absl::StrCat(prefix, last.substr(0, dot), "/"));
      }
    }
    return absl::OkStatus();
  }

  // The codes of the linear, of a type that the format has, or INVALID_ARGUMENT.
  absl::Status CheckCodes(absl::string_view path, const Format& format) const {
    const absl::string_view suffix = format.suffixes.front();
    const TensorLocation* const codes =
        Find(path.empty() ? std::string(suffix) : TensorName(format, path, suffix));
    if (path.empty()) {
      return Invalid(codes == nullptr ? model_ : codes->file->file().shown_name(), ": tensor ",
                     Quoted(suffix), ": got no module path before it, expected \"<path>",
                     format.separator, suffix, "\"");
    }
    if (codes != nullptr && IsMarker(format, suffix, *codes->info)) return absl::OkStatus();
    const auto found = absl::c_find_if(format.suffixes, [&](absl::string_view other) {
      return other != suffix && TellsOfLinear(format, other) &&
             Find(TensorName(format, path, other)) != nullptr;
    });
    const std::string but =
        found == format.suffixes.end() ? "" : absl::StrCat(", but \"", *found, "\" exists");
    if (codes == nullptr) return Broken(path, "tensor \"", suffix, "\" is missing", but);
    return Broken(path, "tensor \"", suffix, "\" is ", Quoted(codes->info->dtype, 32), ", not ",
                  absl::StrJoin(format.code_dtypes, " or "), but);
  }

  // INVALID_ARGUMENT where a tensor is missing, in two files, or not known to the rule's format;
  // UNIMPLEMENTED where an adapter is added to the product.
  absl::StatusOr<LinearFit> Fit(absl::string_view path, const LinearRule& rule) const {
    const Format& format = *rule.format;
    AWQD_RETURN_IF_ERROR(CheckCodes(path, format));
    LinearFit out = {.linear = {.path = std::string(path), .rule = &rule}};
    LinearLocation& linear = out.linear;
    for (absl::string_view suffix : format.suffixes) {
      TensorLocation* const entry = Find(TensorName(format, path, suffix));
      if (entry != nullptr && entry->also_in != nullptr) {
        return Broken(path, "tensor \"", suffix, "\" is in two files, ",
                      entry->file->file().shown_name(), " and ",
                      entry->also_in->file().shown_name());
      }
      if (entry != nullptr) {
        linear.tensors.emplace(std::string(suffix), *entry);
        linear.bytes += entry->info->bytes();  // each is at most its file's size: no overflow
        out.entries.push_back(entry);
      } else if (!IsOptional(format, suffix)) {
        return Broken(path, "tensor \"", suffix, "\" is missing, expected ",
                      absl::StrJoin(format.suffixes, ", "),
                      " (optional: ", absl::StrJoin(format.optional_suffixes, ", "), ")");
      }
    }
    AWQD_RETURN_IF_ERROR(CheckNoneUnread(path, format));
    if (format.lacks == nullptr) return out;
    const auto has = [&](absl::string_view suffix) { return linear.tensors.contains(suffix); };
    if (const absl::string_view suffix = format.lacks(rule.settings, has); !suffix.empty()) {
      return Broken(path, "tensor \"", suffix, "\" is missing; the settings say that it exists");
    }
    return out;
  }

  // An error that names the model and the path.
  absl::Status Error(absl::string_view path, absl::StatusCode code, absl::string_view what) const {
    return absl::Status(code, absl::StrCat(model_, ": weight ", Quoted(path), ": ", what));
  }
  template <typename... What>
  absl::Status Broken(absl::string_view path, const What&... what) const {
    return Error(path, absl::StatusCode::kInvalidArgument, absl::StrCat(what...));
  }

 private:
  // A tensor that the format does not know may change what the codes mean, and so does a product of
  // low rank that is added to theirs.
  absl::Status CheckNoneUnread(absl::string_view path, const Format& format) const {
    const std::string adapter = absl::StrCat(path, ".lora_");
    const auto it = tensors_.lower_bound(adapter);
    if (it != tensors_.end() && absl::StartsWith(it->first, adapter)) {
      return Error(path, absl::StatusCode::kUnimplemented,
                   absl::StrCat("tensor ", Quoted(it->first),
                                ": an adapter of low rank in the model's own files is not read"));
    }
    return VisitBeside(path, format.separator, [&](absl::string_view last, const TensorLocation&) {
      const std::string name = absl::StrCat(path, format.separator, last);
      if (!SplitTensorName(format, name).suffix.empty() || IsWithoutEffect(last) ||
          absl::c_linear_search(format.suffixes_without_effect, last)) {
        return absl::OkStatus();
      }
      return Invalid(model_, ": tensor ", Quoted(name), ": format ", format.name,
                     " has no such tensor, expected \"<path>", format.separator, "\" and one of ",
                     absl::StrJoin(format.suffixes, ", "));
    });
  }

  const std::string& model_;
  Tensors& tensors_;
  const std::atomic<bool>* const cancelled_;
};

// Goes through the paths that tensors name, and then through the tensors that none of these took.
class Checkpoint::Resolver {
 public:
  explicit Resolver(Checkpoint* checkpoint)
      : out_(*checkpoint),
        tensors_(checkpoint->name_, &checkpoint->tensors_, checkpoint->cancelled_) {
    for (const auto& rule : out_.rules_.all()) {
      if (!rule->unread.ok()) continue;
      if (!absl::c_linear_search(formats_, rule->format)) formats_.push_back(rule->format);
      const auto same = [&](const LinearRule* other) { return SameReading(*other, *rule); };
      if (readings_.size() <= kMaxTried && absl::c_none_of(readings_, same)) {
        readings_.push_back(rule.get());
      }
    }
  }

  absl::Status Resolve() {
    AWQD_ASSIGN_OR_RETURN(const std::set<absl::string_view> paths, FindPaths());
    for (const absl::string_view path : paths) AWQD_RETURN_IF_ERROR(ResolvePath(path));
    AWQD_RETURN_IF_ERROR(ResolveExpertsOnce());
    for (const auto& [name, entry] : out_.tensors_) {
      AWQD_RETURN_IF_ERROR(CheckCancelled(out_.cancelled_));
      if (!entry.quantised()) AWQD_RETURN_IF_ERROR(ResolveOther(name, entry));
    }
    AddNotes();
    return absl::OkStatus();
  }

 private:
  // The paths of linears in a format of the rules, by their codes or by what is left of them.
  absl::StatusOr<std::set<absl::string_view>> FindPaths() {
    std::set<absl::string_view> paths;
    for (const auto& [name, entry] : out_.tensors_) {
      AWQD_RETURN_IF_ERROR(CheckCancelled(out_.cancelled_));
      for (const Format* format : formats_) {
        const auto [path, suffix] = SplitTensorName(*format, name);
        if (suffix.empty() || paths.contains(path)) continue;
        const bool tells = IsMarker(*format, suffix, *entry.info) ||
                           (suffix != format->suffixes.front() && TellsOfLinear(*format, suffix) &&
                            tensors_.HasCompanions(*format, path));
        if (tells) paths.insert(path);
      }
    }
    return paths;
  }

  // The rule that reads a path, or the reason that none does.
  struct Findings {
    bool fits = false;
    LinearFit fit;                             // where one does
    absl::Status reason;                       // where none does: that of the nearest rule
    bool near = false;                         // the reason's rule has the codes
    bool unread = false;                       // the reason's rule cannot be read
    bool left_out = false, unmatched = false;  // by the settings, though a rule fits
  };

  // `rule` with the settings of additions.
  const LinearRule& AddSettings(const LinearRule& rule, const Additions& additions) {
    if (additions.empty()) return rule;
    std::unique_ptr<const LinearRule>& made = out_.added_[{&rule, additions}];
    if (made != nullptr) return *made;
    LinearRule out = rule;
    for (const LinearRule* addition : additions) {
      if (out.unread.ok()) out.unread = addition->unread;
      for (const auto& [name, value] : addition->settings.members) {
        if (!out.settings.members.emplace(name, value).second && out.unread.ok()) {
          out.unread = UnreadSetting(name, "several for one linear", "one");
        }
      }
    }
    made = std::make_unique<const LinearRule>(std::move(out));
    return *made;
  }

  // Whether `plain`, with these additions, settles what the path is.
  bool TryRule(absl::string_view path, const LinearRule& plain, const Additions& additions,
               Findings* out) {
    const LinearRule& rule = AddSettings(plain, additions);
    if (!rule.unread.ok()) {
      out->unread = true;
      out->reason = tensors_.Error(path, rule.unread.code(), rule.unread.message());
      return true;
    }
    absl::StatusOr<LinearFit> fit = tensors_.Fit(path, rule);
    if (fit.ok()) {
      out->fit = *std::move(fit);
      out->fits = true;
      return true;
    }
    const bool near = tensors_.CheckCodes(path, *rule.format).ok();
    if (out->reason.ok() || (near && !out->near)) {
      out->reason = fit.status();
      out->near = near;
    }
    return absl::IsUnavailable(fit.status());
  }

  // The rules whose targets match the path, and where none has its tensors, the others: files spell
  // modules in ways that the settings do not know. Of those just one may fit.
  absl::StatusOr<Findings> FindRule(absl::string_view path) {
    AWQD_ASSIGN_OR_RETURN(const Additions additions,
                          out_.rules_.FindAdditions(path, out_.cancelled_));
    Findings out;
    bool left_out = false;
    size_t matched = 0;
    const auto visit = [&](const LinearRule* rule) {
      left_out |= rule == nullptr;
      if (rule == nullptr) return true;
      return !TryRule(path, *rule, additions, &out) && ++matched < kMaxTried;
    };
    AWQD_RETURN_IF_ERROR(out_.rules_.VisitRules(path, visit, out_.cancelled_));
    AWQD_RETURN_IF_ERROR(CheckCancelled(out_.cancelled_));
    out.left_out = left_out;
    if (out.fits || out.unread) return out;
    if (out_.by_path_) {
      if (matched == 0) out.reason = tensors_.Broken(path, "the settings have no entry for it");
      return out;
    }
    Findings others;
    const LinearRule* first = nullptr;
    for (const LinearRule* rule : readings_) {
      Findings one;
      TryRule(path, *rule, additions, &one);
      if (one.fits && first != nullptr) {
        out.fits = false;
        out.reason =
            tensors_.Broken(path, "the settings have no group for it, and several fit its tensors");
        return out;
      }
      if (one.fits) {
        first = rule;
        out.fit = std::move(one.fit);
        out.fits = true;
      } else if (others.reason.ok() || (one.near && !others.near)) {
        others = std::move(one);
      }
    }
    AWQD_RETURN_IF_ERROR(CheckCancelled(out_.cancelled_));
    out.unmatched = out.fits;
    if (!out.fits && matched == 0) {
      out.reason =
          others.near ? others.reason : tensors_.Broken(path, "the settings have no group for it");
    }
    return out;
  }

  absl::Status ResolvePath(absl::string_view path) {
    AWQD_ASSIGN_OR_RETURN(Findings found, FindRule(path));
    if (!found.fits) return AddUnserved(path, std::move(found.reason));
    const size_t before = out_.linears_.size();
    const LinearLocation& linear = found.fit.linear;
    const auto rank = static_cast<int>(linear.codes().info->shape.size());
    if (!HoldsAllExperts(linear)) {
      if (rank == linear.rule->format->code_rank + 1) {
        return AddUnserved(
            path, tensors_.Error(path, absl::StatusCode::kUnimplemented,
                                 absl::StrCat("tensor \"", linear.rule->format->suffixes.front(),
                                              "\": got ", rank, " dimensions, expected ", rank - 1,
                                              ", or that of all experts")));
      }
      out_.linears_.push_back(std::move(found.fit.linear));
    } else {
      absl::StatusOr<std::vector<LinearLocation>> experts = SliceExperts(linear, &out_.slices_);
      if (!experts.ok()) return AddUnserved(path, Prefixed(out_.name_, experts.status()));
      absl::c_move(*experts, std::back_inserter(out_.linears_));
    }
    for (TensorLocation* const entry : found.fit.entries) entry->served = true;
    if (found.unmatched) {
      out_.unmatched_ += static_cast<int64_t>(out_.linears_.size() - before);
    }
    left_out_ += found.left_out && !found.unmatched ? 1 : 0;
    unmatched_ += found.unmatched ? 1 : 0;
    return absl::OkStatus();
  }

  // An expert may have tensors of its own, or be a slice of others, but not both.
  absl::Status ResolveExpertsOnce() {
    std::set<std::string> own, twice;
    for (const LinearLocation& linear : out_.linears_) {
      AWQD_RETURN_IF_ERROR(CheckCancelled(out_.cancelled_));
      if (linear.slice_of.empty()) own.insert(linear.path);
    }
    if (own.size() == out_.linears_.size()) return absl::OkStatus();
    for (const LinearLocation& linear : out_.linears_) {
      AWQD_RETURN_IF_ERROR(CheckCancelled(out_.cancelled_));
      if (linear.slice_of.empty() || !own.contains(linear.path)) continue;
      if (!twice.insert(linear.path).second) continue;
      AWQD_RETURN_IF_ERROR(
          AddUnserved(linear.path,
                      tensors_.Broken(linear.path, "has tensors of its own and is also a slice of ",
                                      Quoted(linear.slice_of))));
    }
    std::erase_if(out_.linears_, [&](const auto& linear) { return twice.contains(linear.path); });
    return absl::OkStatus();
  }

  // A tensor that no linear took: codes that no rule reads are a linear that is not served.
  absl::Status ResolveOther(absl::string_view name, const TensorLocation& entry) {
    Codes codes = ParseCodes(name, *entry.info);
    if (codes.path.empty()) return absl::OkStatus();
    bool quantised = codes.certain;
    const auto find_scales = [&](absl::string_view last, const TensorLocation&) {
      quantised |= IsNameOfScales(last);
      return absl::OkStatus();
    };
    if (!quantised) AWQD_RETURN_IF_ERROR(tensors_.VisitBeside(codes.path, ".", find_scales));
    if (!quantised) AWQD_RETURN_IF_ERROR(tensors_.VisitBeside(codes.path, "_", find_scales));
    if (const size_t dot = name.rfind('.'); !quantised && dot != name.npos) {
      codes.path = name.substr(0, dot);
      AWQD_RETURN_IF_ERROR(tensors_.VisitBeside(codes.path, ".", find_scales));
    }
    if (!quantised) return absl::OkStatus();
    const LinearRule* rule = nullptr;
    const auto keep_first = [&](const LinearRule* matched) {
      if (matched != nullptr) rule = matched;
      return rule == nullptr;
    };
    AWQD_RETURN_IF_ERROR(out_.rules_.VisitRules(codes.path, keep_first, out_.cancelled_));
    absl::StatusCode code = absl::StatusCode::kUnimplemented;
    std::string what = absl::StrCat("tensor ", Quoted(name), " of ", Quoted(entry.info->dtype, 32),
                                    " is quantised, ");
    if (rule == nullptr) {
      absl::StrAppend(&what, "and the settings have no group for it");
    } else if (!rule->unread.ok()) {
      code = rule->unread.code();
      what = std::string(rule->unread.message());
    } else {
      const Format& format = *rule->format;
      absl::StrAppend(&what, "but format ", format.name, " expects codes in \"", codes.path,
                      format.separator, format.suffixes.front(), "\"",
                      format.code_dtypes.empty()
                          ? ""
                          : absl::StrCat(" of ", absl::StrJoin(format.code_dtypes, " or ")));
    }
    return AddUnserved(codes.path, tensors_.Error(codes.path, code, what));
  }

  // All tensors of that path that are no other linear's belong to it.
  absl::Status AddUnserved(absl::string_view path, absl::Status reason) {
    AWQD_RETURN_IF_ERROR(CheckCancelled(out_.cancelled_));
    const auto& unserved = *out_.unserved_.emplace(path, std::move(reason)).first;
    const auto mark = [&](absl::string_view last, TensorLocation& entry) {
      if (!entry.quantised() && !IsWithoutEffect(last)) entry.unserved = &unserved;
      return absl::OkStatus();
    };
    if (path.empty()) {
      for (const Format* format : formats_) {
        for (const absl::string_view suffix : format->suffixes) {
          if (TensorLocation* const entry = tensors_.Find(suffix))
            mark(suffix, *entry).IgnoreError();
        }
      }
      return absl::OkStatus();
    }
    if (TensorLocation* const entry = tensors_.Find(path)) mark(path, *entry).IgnoreError();
    AWQD_RETURN_IF_ERROR(tensors_.VisitBeside(path, ".", mark));
    return tensors_.VisitBeside(path, "_", mark);
  }

  void AddNotes() {
    std::string* const note = &out_.found_.config.note;
    AddNote(out_.rules_.note(), note);
    const auto add_linears = [&](absl::string_view what, int linears) {
      if (linears > 0) AddNote(absl::StrCat(what, ": ", linears, " linears"), note);
    };
    add_linears("quantised, though the settings leave them out", left_out_);
    add_linears("read by their tensors, as the settings have no group for them", unmatched_);
  }

  Checkpoint& out_;
  const PathTensors tensors_;
  std::vector<const Format*> formats_;  // of the rules that are read, mostly one
  // One of the rules that read a linear alike; of all that there are, kMaxTried + 1 at most.
  std::vector<const LinearRule*> readings_;
  int left_out_ = 0;   // linears that are served though the settings leave them out
  int unmatched_ = 0;  // or do not name them
};

absl::Status Checkpoint::FindLinears() {
  linears_.clear();
  unmatched_ = 0;
  slices_.clear();
  unserved_.clear();
  for (auto& [name, tensor] : tensors_) tensor = {tensor.file, tensor.info, tensor.also_in};
  AWQD_RETURN_IF_ERROR(Resolver(this).Resolve());
  if (linears_.empty() && !unserved_.empty()) {
    const size_t others = unserved_.size() - 1;
    const absl::Status& first = unserved_.begin()->second;
    if (others == 0) return first;
    return absl::Status(first.code(), absl::StrCat(first.message(), " (and ", others,
                                                   " more linears that are not read)"));
  }
  if (linears_.empty()) {
    return Invalid(name_, ": got no quantised linear among ", tensors_.size(),
                   " tensors, expected some \"", format().suffixes.front(), "\"",
                   note().empty() ? "" : absl::StrCat(" (", note(), ")"));
  }
  SortLinears();
  return absl::OkStatus();
}

// By keys: linears themselves are large, there may be a million, and no sort can be cancelled.
void Checkpoint::SortLinears() {
  std::map<const TensorFile*, size_t> number_of;  // files are in the order of their names
  for (const auto& file : files_) number_of.emplace(file.get(), number_of.size());
  std::vector<std::tuple<size_t, int64_t, size_t>> places;
  for (size_t i = 0; i < linears_.size(); ++i) {
    const TensorLocation& codes = linears_[i].codes();
    places.emplace_back(number_of.at(codes.file), codes.info->begin, i);
  }
  absl::c_sort(places);
  std::vector<LinearLocation> sorted;
  sorted.reserve(linears_.size());
  for (const auto& [file, begin, i] : places) sorted.push_back(std::move(linears_[i]));
  linears_ = std::move(sorted);
}

}  // namespace awqd::model
