// Who used which memory when, and what waits for what: a clock for each stream, as in `torch.cuda._sanitizer`. Two uses of the
// same bytes, one of which writes, have to be in an order that events, graphs or the host give. So have a use of memory that is
// given back, and what its stream may do there next.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace waits {

using Stream = int64_t;
using Clock = std::map<Stream, int64_t>;  // stream → how much of it is over

static void take_in(Clock& clock, const Clock& other) {
  for (auto [stream, time] : other) clock[stream] = std::max(clock[stream], time);
}

static bool over(const Clock& clock, Stream stream, int64_t time) {
  auto found = clock.find(stream);
  return found != clock.end() && found->second >= time;
}

struct Use {
  uintptr_t begin, end;
  Stream stream;
  int64_t time;
  bool write;
  std::string what;
  int capture;  // the graph that it is a part of, which does nothing before its replay
};

struct Block {
  uintptr_t begin, end;
  Stream stream;  // that it was made for
  std::vector<Use> uses;
  std::set<Stream> recorded;  // streams that the allocator waits for
};

// A place on a stream. capture: the number of the graph that it is in; 0: none.
struct Moment {
  Clock clock;
  int capture = 0;
};

static std::recursive_mutex lock;
using Locked = std::lock_guard<std::recursive_mutex>;
static std::map<Stream, Clock> streams;
static std::map<uintptr_t, Block> blocks;
static std::map<Stream, std::vector<Block>> given_back;
static Clock known;                     // to every thread of the host
static thread_local Clock known_here;  // to this one
static thread_local Stream current = 0;
static Stream made = 0;
static std::vector<std::string> wrong;  // that nobody has raised

// The graph that is captured: its number, its stream, when it began, and what is used in it.
static int capture = 0, captures = 0;
static Stream captured = 0;
static int64_t began = 0;
static std::map<Stream, int64_t> launched;
static std::vector<Use> touched;

static Stream new_stream() {
  Locked here(lock);
  return ++made;
}

static void say(const std::string& text) {
  std::fprintf(stderr, "make-believe GPU: %s\n", text.c_str());
  wrong.push_back(text);
}

static std::string named(Stream stream) { return "stream " + std::to_string(stream); }

static bool in_capture(Stream stream) { return capture && over(streams[stream], captured, began); }

// Something begins on a stream, behind all that the host knows to be over.
static Clock& launch(Stream stream, const std::string& what) {
  auto& clock = streams[stream];
  take_in(clock, known);
  take_in(clock, known_here);
  clock[stream]++;
  if (capture) {
    if (!in_capture(stream)) say("race: " + what + " on " + named(stream) + ", which the graph does not have");
    launched[stream] = clock[stream];
  }
  return clock;
}

static Block* block_of(uintptr_t at) {
  auto next = blocks.upper_bound(at);
  if (next == blocks.begin()) return nullptr;
  auto& block = std::prev(next)->second;
  return at < block.end ? &block : nullptr;
}

static bool is_pinned(uintptr_t at) {
  Locked here(lock);
  auto block = block_of(at);
  return block && block->stream < 0;
}

static void use(const Use& now) {
  auto block = block_of(now.begin);
  if (!block) return;
  const auto& clock = streams[now.stream];
  std::vector<Use> kept;
  for (auto& old : block->uses) {
    bool apart = old.end <= now.begin || now.end <= old.begin, behind = over(clock, old.stream, old.time);
    if (!apart && (now.write || old.write) && !behind)
      say("race: " + now.what + " on " + named(now.stream) + (now.write ? " writes" : " reads") + " what " + old.what + " on " +
          named(old.stream) + (old.write ? " writes" : " reads"));
    bool covered = now.begin <= old.begin && old.end <= now.end;
    if (!(covered && behind && (now.write || (!old.write && old.stream == now.stream)))) kept.push_back(std::move(old));
  }
  kept.push_back(now);
  block->uses = std::move(kept);
  if (capture) touched.push_back(now);
}

static void use_now(uintptr_t begin, size_t size, bool write, Stream stream, const std::string& what) {
  if (size) use({begin, begin + size, stream, streams[stream][stream], write, what, capture});
}

// New memory on the current stream. What was given back there could be it.
static void take(uintptr_t begin, size_t size, bool device = true) {
  Locked here(lock);
  Stream stream = device ? current : -1;
  if (device) {
    Clock clock = streams[stream];
    take_in(clock, known);
    take_in(clock, known_here);
    for (auto& block : given_back[stream])
      for (auto& old : block.uses)
        if (!over(clock, old.stream, old.time))
          say("race: memory is given out again on " + named(stream) + " that " +
              old.what + " on " + named(old.stream) + (old.write ? " writes" : " reads"));
    given_back[stream].clear();
  }
  Block block{begin, begin + size, stream, {}, {}};
  auto now = streams[stream][stream];
  if (device) block.uses.push_back({begin, begin + size, stream, now, true, "who had the memory before", capture});
  blocks[begin] = std::move(block);
}

static void give_back(uintptr_t begin) {
  Locked here(lock);
  auto found = blocks.find(begin);
  if (found == blocks.end()) return;
  Block block = std::move(found->second);
  blocks.erase(found);
  auto& uses = block.uses;
  uses.erase(std::remove_if(uses.begin(), uses.end(),
                            [&](const Use& old) { return old.stream == block.stream || block.recorded.count(old.stream); }),
             uses.end());
  if (uses.size()) given_back[block.stream].push_back(std::move(block));
}

static void record_stream(uintptr_t at, Stream stream) {
  Locked here(lock);
  if (auto block = block_of(at)) block->recorded.insert(stream);
}

static Moment record(Stream stream) {
  Locked here(lock);
  Clock clock = streams[stream];
  take_in(clock, known);
  take_in(clock, known_here);
  return {clock, in_capture(stream) ? capture : 0};
}

static void wait(Stream stream, const Moment& moment) {
  Locked here(lock);
  if (in_capture(stream) && moment.capture != capture) say("race: " + named(stream) + " waits in a graph for what is not in it");
  if (moment.capture && moment.capture != capture) say("race: " + named(stream) + " waits for an event inside of a graph");
  take_in(streams[stream], moment.clock);
}

// The host has waited for something. all: every thread of it knows.
static void hear(const Clock& clock, bool all) {
  Locked here(lock);
  take_in(all ? known : known_here, clock);
}

static void hear_all() {
  Locked here(lock);
  for (auto& [stream, clock] : streams) take_in(known, clock);
}

static void begin_capture() {
  Locked here(lock);
  captured = current;
  began = ++streams[current][current];
  capture = ++captures;
  launched.clear();
  touched.clear();
}

// What the graph uses. Each stream has to be joined by the captured one.
static std::vector<Use> end_capture() {
  Locked here(lock);
  for (auto [stream, time] : launched)
    if (!over(streams[captured], stream, time) && over(streams[stream], captured, began))
      say("race: the graph ends before " + named(stream) + " does");
  for (auto& [begin, block] : blocks) {
    auto none = [](const Use& one) { return one.capture == capture; };
    block.uses.erase(std::remove_if(block.uses.begin(), block.uses.end(), none), block.uses.end());
  }
  capture = 0;
  return std::move(touched);
}

static void replay(const std::vector<Use>& uses) {
  Locked here(lock);
  launch(current, "a replay");
  for (auto& one : uses) use_now(one.begin, one.end - one.begin, one.write, current, "a replay's " + one.what);
}

// What is wrong and nobody has raised; "" where nothing is.
static std::string found() {
  Locked here(lock);
  std::string text;
  for (auto& line : wrong) text += (text.empty() ? "" : "; ") + line;
  wrong.clear();
  return text;
}

}  // namespace waits
