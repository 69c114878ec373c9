// awqctl top: what a server does right now, from the difference of two looks at its counters.
#include <algorithm>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/awqctl/commands.h"
#include "kernels/base/text.h"

namespace awqd::awqctl {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(60);
constexpr char kClearScreen[] = "\x1b[H\x1b[2J";

// What `share` of the values that came between two looks do not pass, between two bounds as if they
// lay evenly; "-" when none came.
std::string Quantile(const v1::Histogram& before, const v1::Histogram& now, double share) {
  int64_t total = 0;
  const auto count = [&](int i) {
    return now.counts(i) - (i < before.counts_size() ? before.counts(i) : 0);
  };
  for (int i = 0; i < now.counts_size(); ++i) total += count(i);
  const double wanted = share * static_cast<double>(total);
  double below = 0;
  for (int i = 0; total > 0 && i < now.bounds_size() && i < now.counts_size(); ++i) {
    const auto here = static_cast<double>(count(i));
    if (here > 0 && below + here >= wanted) {
      const double low = i == 0 ? 0 : now.bounds(i - 1);
      const double value = low + (now.bounds(i) - low) * (wanted - below) / here;
      return absl::StrFormat("%.2f ms", 1000 * value);
    }
    below += here;
  }
  if (total == 0 || now.bounds().empty()) return "-";
  return absl::StrFormat("> %.0f ms", 1000 * *now.bounds().rbegin());
}

// "12.3"; "-" of nothing.
std::string Mean(double sum, int64_t count) {
  return count > 0 ? absl::StrFormat("%.2f", sum / static_cast<double>(count)) : "-";
}

template <typename Counters>
std::map<std::string, Counters> ByName(
    const google::protobuf::RepeatedPtrField<Counters>& counters) {
  std::map<std::string, Counters> out;
  for (const Counters& one : counters) {
    if constexpr (requires { one.id(); }) {
      out[one.id()] = one;
    } else {
      out[one.name()] = one;
    }
  }
  return out;
}

// Two answers of a server, `seconds` apart.
class Screen {
 public:
  Screen(const v1::GetServerInfoResponse& before, const v1::GetServerInfoResponse& now,
         double seconds)
      : before_(before), now_(now), seconds_(seconds) {}

  std::string Text() const {
    return absl::StrCat(Head(), "\n", Devices().Text(), "\n", Models().Text());
  }

 private:
  std::string Rate(int64_t before, int64_t now) const {
    // A server that was restarted counts from 0.
    const int64_t more = now >= before ? now - before : now;
    return absl::StrFormat("%.1f/s", static_cast<double>(more) / seconds_);
  }

  std::string Head() const {
    const v1::Counters &was = before_.counters(), &is = now_.counters();
    return absl::StrCat("awqd ", OneLine(now_.version()), ", up ",
                        absl::FormatDuration(absl::Seconds(now_.uptime_s())), "\ncalls ",
                        Rate(was.calls(), is.calls()), ", failed ",
                        Rate(was.failed_calls(), is.failed_calls()), ", median ",
                        Quantile(was.request_calls(), is.request_calls(), 0.5), ", 99 % ",
                        Quantile(was.request_calls(), is.request_calls(), 0.99), "\nin flight ",
                        FormatBytes(is.in_flight_bytes()),
                        is.in_flight_limit_bytes() > 0
                            ? absl::StrCat(" of ", FormatBytes(is.in_flight_limit_bytes()))
                            : "",
                        ", memory of the process ", FormatBytes(is.resident_bytes()), "\n");
  }

  Table Devices() const {
    Table table({"DEVICE", "REQUESTS", "TOKENS", "TOKENS/BATCH", "QUEUE", "WAITED", "BUSY", "TAKEN",
                 "FREE", "WEIGHTS"});
    std::map<std::string, v1::DeviceCounters> before = ByName(before_.counters().devices());
    std::map<std::string, v1::DeviceStatus> memory = ByName(now_.devices());
    for (const v1::DeviceCounters& is : now_.counters().devices()) {
      const v1::DeviceCounters& was = before[is.id()];
      const v1::DeviceStatus& status = memory[is.id()];
      table.AddRow(
          {OneLine(is.id()), Rate(was.requests(), is.requests()), Rate(was.tokens(), is.tokens()),
           Mean(static_cast<double>(is.tokens() - was.tokens()), is.batches() - was.batches()),
           absl::StrCat(is.queued_requests()), Quantile(was.queue(), is.queue(), 0.5),
           absl::StrFormat("%.0f %%", 100 * (is.compute_s() - was.compute_s()) / seconds_),
           FormatBytes(status.memory_total_bytes() - status.memory_free_bytes()),
           FormatBytes(status.memory_free_bytes()), FormatBytes(status.weights_bytes())});
    }
    return table;
  }

  Table Models() const {
    Table table({"MODEL", "REQUESTS", "TOKENS", "FAILED", "WEIGHTS", "LOADED"});
    std::map<std::string, v1::ModelCounters> before = ByName(before_.counters().models());
    for (const v1::ModelCounters& is : now_.counters().models()) {
      const v1::ModelCounters& was = before[is.name()];
      table.AddRow({OneLine(is.name()), Rate(was.requests(), is.requests()),
                    Rate(was.tokens(), is.tokens()), Rate(was.failed(), is.failed()),
                    FormatBytes(is.weights_bytes()),
                    absl::StrFormat("%.0f %%", 100 * is.loaded_share())});
    }
    return table;
  }

  const v1::GetServerInfoResponse& before_;
  const v1::GetServerInfoResponse& now_;
  const double seconds_;
};

}  // namespace

int Top(const Flags& flags, client::Client& client, Console& console) {
  auto before = client.GetServerInfo(Deadline(flags, kCallTimeout));
  absl::Time then = absl::Now();
  if (!before.ok()) return CallFailed(before.status(), flags, client, console);
  for (int64_t shown = 0; flags.screens == 0 || shown < flags.screens; ++shown) {
    absl::SleepFor(absl::Seconds(flags.interval_s));
    auto now = client.GetServerInfo(Deadline(flags, kCallTimeout));
    if (!now.ok()) return CallFailed(now.status(), flags, client, console);
    const absl::Time at = absl::Now();
    if (flags.json) {
      console.out << ToJson(now->counters());
    } else {
      const std::string screen =
          Screen(*before, *now, std::max(1e-3, absl::ToDoubleSeconds(at - then))).Text();
      console.out << (console.terminal ? kClearScreen : shown > 0 ? "\n" : "") << screen;
    }
    console.out << std::flush;
    before = std::move(now);
    then = at;
  }
  return kOk;
}

}  // namespace awqd::awqctl
