// awqctl bench: runs the plan, shows progress, and prints and writes the results.
#include "client/bench/bench.h"

#include <fcntl.h>
#include <unistd.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "client/awqctl/commands.h"
#include "client/files/output_file.h"
#include "client/remove_on_signal.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"

namespace awqd::awqctl {
namespace {

using bench::PointResult;

// 950 us, 1.23 ms, 45.6 s
std::string Time(double ns) {
  if (ns < 1e6) return absl::StrFormat("%.0f us", ns / 1e3);
  if (ns < 1e9) return absl::StrFormat("%.3g ms", ns / 1e6);
  return absl::StrFormat("%.3g s", ns / 1e9);
}

// The same for a cell of the table, 1.23ms.
std::string TimeCell(double ns) { return absl::StrReplaceAll(Time(ns), {{" ", ""}}); }

// 950, 12.3k, 4.56M
std::string Count(double count) {
  if (count < 1000) return absl::StrFormat("%.3g", count);
  if (count < 1e6) return absl::StrFormat("%.4gk", count / 1e3);
  return absl::StrFormat("%.4gM", count / 1e6);
}

std::vector<std::string> Row(const PointResult& result) {
  const bench::Tally& tally = result.load.tally;
  const bench::Rates rates = bench::RatesOf(result.load);
  const double executed = static_cast<double>(std::max<int64_t>(1, tally.executed));
  std::vector<std::string> row = {result.point.Name(), Count(rates.requests), Count(rates.tokens),
                                  Count(rates.bytes / 1e6)};
  for (const bench::NamedQuantile& quantile : bench::kQuantiles) {
    row.push_back(TimeCell(tally.latency.QuantileNs(quantile.share)));
  }
  row.push_back(TimeCell(tally.latency.max_ns()));
  row.push_back(absl::StrCat(tally.errors() + tally.malformed + result.load.unsent));
  const bool ran = tally.executed > 0;
  row.push_back(ran ? absl::StrFormat("%.1f", tally.batch_tokens / executed) : "-");
  row.push_back(ran ? TimeCell(tally.queue.mean_ns()) : "-");
  row.push_back(ran ? TimeCell(tally.compute.mean_ns()) : "-");
  return row;
}

// A line for each fact that only some benches have: goodput, refusals, errors, health, a late
// generator.
std::string Remarks(const bench::Plan& plan, const PointResult& result) {
  const bench::Tally& tally = result.load.tally;
  std::string text;
  const auto add = [&](const std::string& remark) {
    absl::StrAppend(&text, "  ", result.point.Name(), ": ", remark, "\n");
  };
  if (plan.deadline != absl::InfiniteDuration()) {
    add(absl::StrCat("goodput ", Count(bench::RatesOf(result.load).good), "/s within ",
                     absl::FormatDuration(plan.deadline)));
  }
  for (int code = 1; code < bench::kCodes; ++code) {
    if (tally.answers[code] == 0) continue;
    add(absl::StrCat(tally.answers[code], " ", bench::CodeName(code),
                     ", the first: ", OneLine(tally.first_message[code])));
  }
  if (tally.refused.count() > 0) {
    add(absl::StrCat("refusals answered in p99 ", Time(tally.refused.QuantileNs(0.99)), ", max ",
                     Time(tally.refused.max_ns())));
  }
  if (tally.malformed > 0) add(absl::StrCat(tally.malformed, " answers that do not parse"));
  if (result.load.unsent > 0) {
    add(absl::StrCat(result.load.unsent, " requests never sent: ", plan.max_in_flight,
                     " were unanswered (--max_in_flight)"));
  }
  if (result.point.open() && tally.lag.QuantileNs(0.99) > 1000000) {
    add(absl::StrCat("requests were sent late, p99 ", Time(tally.lag.QuantileNs(0.99)),
                     ": this generator had no free call or no free core"));
  }
  if (result.health_probed) {
    add(absl::StrCat("health Check p99 ", Time(result.health.latency.QuantileNs(0.99)), ", max ",
                     Time(result.health.latency.max_ns()), " of ", result.health.latency.count(),
                     "; ", result.health.failed, " failed, ", result.health.not_serving,
                     " not serving"));
  }
  return text;
}

void PrintTable(const bench::Plan& plan, const std::vector<PointResult>& results,
                Console& console) {
  Table table({"load", "req/s", "tokens/s", "MB/s", "p50", "p90", "p99", "p99.9", "max", "failed",
               "merged", "queue", "compute"});
  std::string remarks;
  for (const PointResult& result : results) {
    table.AddRow(Row(result));
    absl::StrAppend(&remarks, Remarks(plan, result));
  }
  console.out << table.Text(console) << remarks;
}

void ShowProgress(const bench::LoadPoint& point, const bench::LoadProgress& now, Console& console) {
  const double rate =
      now.seconds > 0 ? static_cast<double>(now.answers + now.errors) / now.seconds : 0;
  console.err << kClearLine << absl::StrFormat("%s  %3.0f %%  ", point.Name(), now.share * 100)
              << (now.warming_up ? "warming up"
                                 : absl::StrFormat("%s answers/s  p99 %s  %d errors", Count(rate),
                                                   Time(now.p99_ns), now.errors))
              << std::flush;
}

std::string Title(const bench::Plan& plan) {
  const std::string tokens =
      absl::StrJoin(plan.tokens, ",", [](std::string* out, const bench::TokensShare& entry) {
        absl::StrAppend(out, entry.tokens);
      });
  const std::string more =
      plan.weights.size() > 1 ? absl::StrCat(" and ", plan.weights.size() - 1, " more") : "";
  return absl::StrCat(plan.weights[0].model, "/", plan.weights[0].weight, more, ", tokens ",
                      tokens);
}

// A file that is opened before the work and written after it. Unless Write was called, the file is
// left as it was found, by signals too where RemoveFilesOnSignals was called.
class ReportFile {
 public:
  ReportFile() = default;
  ReportFile(const ReportFile&) = delete;
  ReportFile& operator=(const ReportFile&) = delete;
  ~ReportFile() {
    if (created_) unlink(path_.c_str());
  }

  // An error says why `path` cannot be written. An empty path is no file: OK, and so is Write.
  absl::Status Open(const std::string& path) {
    if (path.empty()) return absl::OkStatus();
    path_ = path;
    auto file = client::OutputFile::Create(path);
    created_ = file.ok();
    if (created_) on_signal_ = client::RemoveOnSignal(path);
    if (absl::IsAlreadyExists(file.status())) {  // a device, or the report of another bench
      const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
      if (fd < 0) return client::FileError("write", path);
      file = std::make_unique<client::OutputFile>(path, fd);
    }
    if (!file.ok()) return file.status();
    file_ = *std::move(file);
    return absl::OkStatus();
  }

  // Once; replaces what the file holds.
  absl::Status Write(absl::string_view text) {
    if (file_ == nullptr) return absl::OkStatus();
    created_ = false;
    on_signal_ = client::RemoveOnSignal();
    absl::Status status = file_->Truncate();
    if (status.ok()) status = file_->Append(text);
    return status.ok() ? file_->Close() : status;
  }

 private:
  std::string path_;
  std::unique_ptr<client::OutputFile> file_;
  bool created_ = false;  // by Open, and empty still
  client::RemoveOnSignal on_signal_;
};

// A bench without an answer is a failed call. Returns the last error that the server answered with.
absl::Status CheckAnswered(const std::vector<PointResult>& results) {
  absl::Status first = absl::DeadlineExceededError("no request was answered");
  for (const PointResult& result : results) {
    const bench::Tally& tally = result.load.tally;
    if (tally.answers[0] > 0) return absl::OkStatus();
    for (int code = 1; code < bench::kCodes; ++code) {
      if (tally.answers[code] == 0) continue;
      first = absl::Status(static_cast<absl::StatusCode>(code), tally.first_message[code]);
    }
  }
  return first;
}

}  // namespace

absl::StatusOr<int> Bench(const Flags& flags, client::Client& client, Console& console) {
  bench::Plan plan = flags.bench.plan;
  if (plan.points.empty()) plan.points.push_back({.concurrency = 1});
  ReportFile json_file, svg_file;
  absl::Status opened = json_file.Open(flags.bench.json_file);
  opened.Update(svg_file.Open(flags.bench.svg));
  if (!opened.ok()) return FileFailed(opened);
  for (bench::WeightShare& share : plan.weights) {
    AWQD_ASSIGN_OR_RETURN(
        const ProductTarget target,
        FindTarget(flags, client, share.model, share.weight + (share.mlp ? ".gate_proj" : ""),
                   share.weight + (share.mlp ? ".down_proj" : "")));
    share.k = target.k;
    share.n = target.n;
    share.experts = target.experts;
  }
  if (flags.bench.shared_memory) {
    AWQD_ASSIGN_OR_RETURN(plan.shared_memory_prefix, SharedMemoryPrefix(flags, client));
  }
  std::vector<PointResult> results;
  absl::Status ran;
  int signal_number = 0;
  {
    const Interrupt interrupt;
    const auto progress = [&](const bench::LoadPoint& point, const bench::LoadProgress& now) {
      if (console.terminal) ShowProgress(point, now, console);
      return interrupt.signal_number() == 0;
    };
    ran = bench::RunBench({flags.address, flags.security}, plan, progress, &results);
    signal_number = interrupt.signal_number();
  }
  if (console.terminal) console.err << kClearLine << std::flush;
  if (results.empty()) return ran;
  const std::string json = bench::ToJson(flags.address, plan, results);
  if (flags.json) {
    console.out << json;
  } else {
    PrintTable(plan, results, console);
  }
  // Both, whatever becomes of the first: the load is over and will not be run again.
  absl::Status written = json_file.Write(json);
  written.Update(svg_file.Write(bench::ToSvg(Title(plan), results)));
  if (!written.ok()) return FileFailed(written);
  if (signal_number != 0) {
    console.err << "awqctl: interrupted in load point " << results.size() << " of "
                << plan.points.size() << "; this is what was measured until then\n";
    return 128 + signal_number;
  }
  if (!ran.ok()) {
    return absl::Status(ran.code(),
                        absl::StrCat(ran.message(), " in load point ", results.size(), " of ",
                                     plan.points.size(), "; this is what was measured until then"));
  }
  AWQD_RETURN_IF_ERROR(CheckAnswered(results));
  return kOk;
}

}  // namespace awqd::awqctl
