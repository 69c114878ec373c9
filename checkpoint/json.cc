// Strict JSON on top of nlohmann's event parser.
#include "checkpoint/json.h"

#include <utility>

#include "checkpoint/file.h"
#include "kernels/base/status.h"

namespace awqd::model {
namespace {

class KeyCollector : public JsonEvents {
 public:
  KeyCollector(int max_depth, KeysInOrder* keys) : JsonEvents(max_depth), keys_(keys) {}

 private:
  absl::Status StartObject() override {
    open_.push_back(keys_->size());
    keys_->emplace_back();
    return absl::OkStatus();
  }
  absl::Status Key(absl::string_view key) override {
    (*keys_)[open_.back()].emplace_back(key);
    return absl::OkStatus();
  }
  absl::Status EndObject() override {
    open_.pop_back();
    return absl::OkStatus();
  }

  KeysInOrder* const keys_;
  std::vector<size_t> open_;  // objects around the place that is read
};

}  // namespace

bool JsonEvents::Keep(absl::Status status) {
  if (status.ok()) return true;
  status_ = std::move(status);
  return false;
}

bool JsonEvents::Enter() {
  if (++depth_ <= max_depth_) return true;
  return Keep(
      Invalid("got JSON nested deeper than ", max_depth_, " levels, expected at most that"));
}

bool JsonEvents::start_object(size_t) {
  if (!Enter()) return false;
  keys_.emplace_back();
  return Keep(StartObject());
}

bool JsonEvents::key(string_t& value) {
  if (keys_.back().insert(value).second) return Keep(Key(value));
  return Keep(Invalid("duplicate key ", Quoted(value)));
}

bool JsonEvents::end_object() {
  --depth_;
  keys_.pop_back();
  return Keep(EndObject());
}

bool JsonEvents::end_array() {
  --depth_;
  return Keep(EndArray());
}

bool JsonEvents::parse_error(size_t position, const std::string& token,
                             const nlohmann::detail::exception&) {
  return Keep(
      Invalid("not valid JSON in UTF-8 at byte ", position, " (near ", Quoted(token, 64), ")"));
}

absl::Status ParseJson(absl::string_view text, JsonEvents* events) {
  // The parser takes a NUL for the end of its input and would not see what follows.
  if (const size_t at = text.find('\0'); at != text.npos) {
    return Invalid("got a NUL byte in JSON at byte ", at);
  }
  nlohmann::json_sax<nlohmann::json>* const sax = events;
  const bool done = nlohmann::json::sax_parse(text.begin(), text.end(), sax);
  if (!events->status().ok()) return events->status();
  return done ? absl::OkStatus() : absl::InvalidArgumentError("not valid JSON");
}

absl::StatusOr<nlohmann::json> ParseJsonObject(absl::string_view text, int max_depth,
                                               KeysInOrder* keys) {
  KeysInOrder unused;
  KeyCollector rules(max_depth, keys == nullptr ? &unused : keys);
  AWQD_RETURN_IF_ERROR(ParseJson(text, &rules));
  nlohmann::json out =
      nlohmann::json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!out.is_object()) {
    return Invalid("got a JSON ", out.type_name(), ", expected an object");
  }
  return out;
}

}  // namespace awqd::model
