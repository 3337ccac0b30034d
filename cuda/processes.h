// Copies between devices of several processes of one host: what copies.h does, over sockets.
//
// Python has connected every two processes by a Unix socket (kernels/processes.py). Over it they
// tell each other what threads of one process would see on the board:
//
//   memory   an allocation that posts will name, with a file descriptor if others cannot name it
//   gone     an allocation that was released
//   post     a device has started copies: their name, its arrays, and the events that they wait for
//   issued   a device has enqueued the copies into its arrays, or has given up
//   failed   the clique makes no more copies
//   waited   all devices of the process have enqueued their waits: events may be recorded again
//   bye      the process copies no more, and why
//
// Devices of several processes that copy among each other are a *clique*. Their processes run equal
// programs, so starts meet by their names: CopyName. After a failure it makes no more copies:
// whoever has started one, or starts one, returns an error with the first reason. A clique fails if
// a device of it fails, if a process cannot use what another one posts, or if a process has gone. A
// socket that closes without "bye" belongs to a process that has died. No process ends because of
// that, unless a GPU already waits for the one that has died, in a copy or in a collective of XLA:
// nothing else ends such a wait.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "copies.h"

namespace jdistadam {

// An address in another process: an allocation's number there, and an offset.
struct CopyAddress {
  uint64_t allocation, offset;
};

class MessageWriter {
 public:
  template <typename T>
  MessageWriter& Put(const T& x) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes.append(reinterpret_cast<const char*>(&x), sizeof x);
    return *this;
  }
  template <typename T>
  MessageWriter& PutAll(const std::vector<T>& all) {
    Put(uint64_t(all.size()));
    for (const T& x : all) Put(x);
    return *this;
  }
  MessageWriter& PutText(const std::string& text) {
    return PutAll(std::vector<char>(text.begin(), text.end()));
  }

  std::string bytes;
};

class MessageReader {
 public:
  MessageReader(const char* first, size_t size) : next_(first), left_(size) {}

  template <typename T>
  T Get() {
    T x{};
    is_valid = is_valid && left_ >= sizeof x;
    if (!is_valid) return x;
    std::memcpy(&x, next_, sizeof x);
    next_ += sizeof x, left_ -= sizeof x;
    return x;
  }
  template <typename T>
  std::vector<T> GetAll() {
    const auto count = Get<uint64_t>();
    is_valid = is_valid && count <= left_ / sizeof(T);
    std::vector<T> all(is_valid ? count : 0);
    for (T& x : all) x = Get<T>();
    return all;
  }
  std::string GetText() {
    const auto all = GetAll<char>();
    return std::string(all.begin(), all.end());
  }

  bool is_valid = true;

 private:
  const char* next_;
  size_t left_;
};

enum class CopyMessage : uint32_t { kMemory, kGone, kPost, kIssued, kFailed, kWaited, kBye };

// A socket to another process. Any thread may send, without waiting; one receives.
class CopyPeer {
 public:
  CopyPeer(int fd, int process, pid_t pid) : process(process), pid(pid), fd_(fd) {}

  int fd() const { return fd_; }

  // Returns whether something is left for Flush. `passed`: a descriptor to send along.
  bool Send(CopyMessage kind, const std::string& body, int passed = -1) {
    MessageWriter head;
    head.Put(uint32_t(body.size() + sizeof(kind))).Put(kind);
    const std::lock_guard<std::mutex> lock(sending_);
    if (is_closed_) return false;
    to_send_.push_back({head.bytes + body, passed < 0 ? -1 : fcntl(passed, F_DUPFD_CLOEXEC, 0)});
    return FlushLocked();
  }

  // Sends what the socket takes now. The thread that receives notices one that is closed.
  bool Flush() {
    const std::lock_guard<std::mutex> lock(sending_);
    return FlushLocked();
  }

  // Closes the socket, after what is left has been sent, if the other process takes it in time.
  void Close() {
    for (int i = 0; i < 100 && Flush(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    const std::lock_guard<std::mutex> lock(sending_);
    for (const Outgoing& unsent : to_send_)
      if (unsent.passed >= 0) close(unsent.passed);
    to_send_.clear();
    if (!is_closed_) close(fd_);
    is_closed_ = true;
  }

  // Reads what has come, and calls handle(kind, reader) for each whole message, which returns why
  // it is of no use. False if nothing will come.
  template <typename Handle>
  bool Receive(const Handle& handle) {
    char bytes[1 << 16];
    iovec part{bytes, sizeof bytes};
    msghdr message{};
    message.msg_iov = &part, message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))];
    message.msg_control = control, message.msg_controllen = sizeof control;
    const ssize_t count = recvmsg(fd_, &message, MSG_CMSG_CLOEXEC);
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) return true;
    if (count <= 0) return false;
    for (cmsghdr* x = CMSG_FIRSTHDR(&message); x != nullptr; x = CMSG_NXTHDR(&message, x)) {
      if (x->cmsg_level != SOL_SOCKET || x->cmsg_type != SCM_RIGHTS) continue;
      for (size_t i = 0; CMSG_LEN((i + 1) * sizeof(int)) <= x->cmsg_len; ++i) {
        int fd;
        std::memcpy(&fd, CMSG_DATA(x) + i * sizeof fd, sizeof fd);
        passed_.push_back(fd);
      }
    }
    received_.append(bytes, size_t(count));
    size_t first = 0;
    while (received_.size() - first >= sizeof(uint32_t)) {
      uint32_t size;
      std::memcpy(&size, received_.data() + first, sizeof size);
      if (received_.size() - first - sizeof size < size) break;
      MessageReader reader(received_.data() + first + sizeof size, size);
      const auto kind = reader.Get<CopyMessage>();
      refused = handle(kind, reader);
      if (refused.empty() && !reader.is_valid) refused = "a message of a wrong size";
      if (!refused.empty() || !left.empty()) return false;
      first += sizeof size + size;
    }
    received_.erase(0, first);
    return true;
  }

  // The descriptor that came with this message; -1 if none did.
  int TakePassed() {
    if (passed_.empty()) return -1;
    const int fd = passed_.front();
    passed_.pop_front();
    return fd;
  }

  const int process;
  const pid_t pid;
  std::string left;     // as it has said: "ended", or why it copies no more
  std::string refused;  // why this process does not listen any more

 private:
  struct Outgoing {
    std::string bytes;
    int passed;
    size_t done = 0;
  };

  bool FlushLocked() {
    while (!to_send_.empty()) {
      Outgoing& next = to_send_.front();
      iovec part{next.bytes.data() + next.done, next.bytes.size() - next.done};
      msghdr message{};
      message.msg_iov = &part, message.msg_iovlen = 1;
      alignas(cmsghdr) char control[CMSG_SPACE(sizeof next.passed)] = {};
      if (next.passed >= 0) {
        message.msg_control = control, message.msg_controllen = sizeof control;
        cmsghdr* header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof next.passed);
        std::memcpy(CMSG_DATA(header), &next.passed, sizeof next.passed);
      }
      const ssize_t sent = sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0 && errno == EAGAIN) return true;
      if (next.passed >= 0) close(next.passed), next.passed = -1;
      next.done += sent < 0 ? 0 : size_t(sent);
      if (sent < 0 || next.done == next.bytes.size()) to_send_.pop_front();
    }
    return false;
  }

  const int fd_;
  bool is_closed_ = false;
  std::mutex sending_;
  std::deque<Outgoing> to_send_;
  std::string received_;
  std::deque<int> passed_;
};

constexpr int64_t kOfProcesses = int64_t{1} << 32;

struct JoinedDevice {
  int64_t number;        // JAX's plus kOfProcesses
  int process, ordinal;  // there
};

struct JoinedProcesses {
  std::vector<JoinedDevice> devices;                 // of all processes
  std::vector<std::tuple<int, int, pid_t>> sockets;  // process, descriptor, pid; others alone
  double grace_seconds;                              // for GPUs that wait for one that has died
};

// The other processes. `Backend` makes copies and knows memory:
//
//   Board& board()
//   void Use(ordinals)                called first, by the thread that listens: this process's
//   string Show(peers, source, bytes)     tells others of the memory of a source; why it cannot
//   CopyAddress AddressOf(source)
//   char* Reach(peer, address, bytes, why)   where this process reaches them; null if it cannot
//   void Learn(peer, kind, reader)    a message on memory
//   void PutExtra(writer, extra), bool GetExtra(peer, reader, extra*)
//   void Launch(job)                  lets the devices of this process send
//   function<bool()> UnderWay()       whether what devices have enqueued until now is under way
template <typename Board, typename Backend>
class CopyProcesses {
 public:
  using Job = typename Board::Job;
  using JobPointer = typename Board::JobPointer;
  using Peers = std::map<int, std::unique_ptr<CopyPeer>>;  // by process

  // Once in a process, before any copy.
  void Join(int me, const JoinedProcesses& joined) {
    const std::lock_guard<std::mutex> lock(mutex_);
    me_ = me, grace_seconds_ = joined.grace_seconds;
    for (const JoinedDevice& device : joined.devices) devices_[device.number] = device;
    for (const auto& [process, fd, pid] : joined.sockets)
      peers_[process] = std::make_unique<CopyPeer>(fd, process, pid);
    if (pipe2(wake_, O_CLOEXEC) != 0) std::abort();
    pthread_atfork(nullptr, nullptr, &CopyProcesses::CloseInChild);
    Joined() = this;
    backend_.board().tell_failure = [this](int64_t group, const std::string& why) {
      TellFailure(group, why);
    };
    thread_ = std::thread([this] {
      Listen();
      const std::lock_guard<std::mutex> lock(mutex_);
      has_listened_ = true;
      listened_.notify_all();
    });
  }

  // The number of a device of this process in programs of several processes; -1 if unknown.
  int64_t NumberOf(int32_t ordinal) const {
    for (const auto& [number, device] : devices_)
      if (device.process == me_ && device.ordinal == ordinal) return number;
    return -1;
  }

  // The clique of some devices; null if one of them is not known.
  const CopyClique* CliqueOf(const std::vector<int64_t>& numbers) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = cliques_.find(numbers);
    if (known != cliques_.end()) return known->second.get();
    auto clique = std::make_unique<CopyClique>();
    clique->devices = numbers;
    uint64_t hash = 14695981039346656037u;
    for (const int64_t number : numbers) {
      const auto found = devices_.find(number);
      if (found == devices_.end()) return nullptr;
      const JoinedDevice& device = found->second;
      clique->processes.push_back(device.process == me_ ? kHere : device.process);
      clique->ordinals.push_back(device.ordinal);
      hash = (hash ^ uint64_t(number)) * 1099511628211u;
    }
    clique->group = int64_t(hash | (uint64_t{1} << 63));
    return (cliques_[numbers] = std::move(clique)).get();
  }

  // Before a device of this process starts copies. Returns why it cannot.
  std::string Show(const CopyVisitor& who, bool is_gather, const std::vector<CopyArray>& arrays) {
    std::string why;
    for (const CopyArray& a : arrays)
      if (why.empty()) why = backend_.Show(peers_, a.source, BytesOf(a, is_gather, who.count));
    return why;
  }

  // A device of this process starts copies: `start` posts them on the board, and others are told.
  // Null if the clique has failed, as it has if a process of it has gone.
  template <typename Start>
  JobPointer Post(const CopyVisitor& who, const Start& start) {
    const std::lock_guard<std::mutex> lock(posting_);  // so that nothing is launched before
    for (const auto& [process, why] : gone_)
      if (Has(*who.clique, process)) backend_.board().Fail(who.Scope(), why);
    const JobPointer job = start();
    if (job != nullptr) TellPost(job, who.me);
    return job;
  }

  // A device of this process has enqueued its waits.
  void HasWaited(const JobPointer& job) {
    bool is_last;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto record = records_.find(job->name);
      if (record == records_.end()) return;
      is_last = --record->second.num_to_wait == 0;
      ForgetIfDone(record);
    }
    if (!is_last) return;
    MessageWriter body;
    TellAll(*job->clique, CopyMessage::kWaited, body.Put(job->name).bytes);
  }

  // This process copies no more: it has "ended", or left for another reason.
  void Stop(const std::string& why = "ended") {
    if (peers_.empty() || is_stopped_) return;
    for (const auto& [process, peer] : peers_)
      peer->Send(CopyMessage::kBye, MessageWriter().PutText(why).bytes);
    is_stopped_ = true;
    Wake();
    {
      std::unique_lock<std::mutex> lock(mutex_);  // the thread may hang in the driver
      if (!listened_.wait_for(lock, WaitLimit(), [&] { return has_listened_; })) {
        thread_.detach();
        return;
      }
    }
    if (thread_.joinable()) thread_.join();
    for (std::thread& thread : waiting_) thread.join();  // for grace_seconds_ at most
    for (const auto& [process, peer] : peers_) peer->Close();
  }

  Backend& backend() { return backend_; }
  CopyPeer& peer(int process) { return *peers_.at(process); }

 private:
  void TellPost(const JobPointer& job, int me) {
    Remember(job);
    MessageWriter body;
    body.PutAll(job->clique->devices).Put(me).Put(job->name).Put(job->posts[me].execution);
    body.Put(uint8_t(job->is_gather));
    backend_.PutExtra(&body, job->posts[me].extra);
    body.Put(uint64_t(job->posts[me].arrays.size()));
    for (const CopyArray& a : job->posts[me].arrays) {
      body.Put(backend_.AddressOf(a.source));
      body.Put(uint64_t(a.rows)).Put(uint64_t(a.run)).Put(uint64_t(a.pitch));
    }
    TellAll(*job->clique, CopyMessage::kPost, body.bytes);
  }

  struct Record {
    JobPointer job;
    std::set<int> to_settle;  // places in other processes that have not enqueued their copies
    std::set<int> to_hear;    // processes whose devices have not all waited
    int num_to_wait;          // devices of this process that have not
  };
  using Records = std::map<CopyName, Record>;

  static CopyProcesses*& Joined() {
    static CopyProcesses* joined = nullptr;
    return joined;
  }

  // Or others would not see that the parent has died.
  static void CloseInChild() {
    if (Joined()->is_stopped_) return;
    for (const auto& [process, peer] : Joined()->peers_) close(peer->fd());
  }

  // Keeps a job, and with it its events, until all processes have waited for it.
  void Remember(const JobPointer& job) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Record& record = records_[job->name];
    if (record.job != nullptr) return;
    record.job = job;
    record.num_to_wait = 0;
    for (int p = 0; p < job->count(); ++p) {
      const int process = job->clique->processes[p];
      if (process == kHere) {
        ++record.num_to_wait;
      } else {
        record.to_settle.insert(p), record.to_hear.insert(process);
      }
    }
    job->tell = [this, job = job.get()](int me, const std::string& why) {
      TellIssued(*job->clique, job->name, me, why);
    };
  }

  // A device has enqueued its copies, or has given up.
  void TellIssued(const CopyClique& clique, const CopyName& name, int me, const std::string& why) {
    MessageWriter body;
    body.Put(name).Put(me).PutText(why);
    TellAll(clique, CopyMessage::kIssued, body.bytes);
  }

  void ForgetIfDone(typename Records::iterator it) {
    const Record& record = it->second;
    if (record.num_to_wait == 0 && record.to_settle.empty() && record.to_hear.empty())
      records_.erase(it);
  }

  // Each process once. One that has gone is noticed by the thread that listens.
  void TellAll(const CopyClique& clique, CopyMessage kind, const std::string& body) {
    std::set<int> told{kHere};
    for (const int process : clique.processes)
      if (told.insert(process).second && peers_.at(process)->Send(kind, body)) Wake();
  }

  void Wake() { (void)!write(wake_[1], "", 1); }

  void Listen() {
    std::vector<int> ordinals;
    for (const auto& [number, device] : devices_)
      if (device.process == me_) ordinals.push_back(device.ordinal);
    pthread_setname_np(pthread_self(), "jda peers");
    backend_.Use(ordinals);
    std::vector<pollfd> fds{{wake_[0], POLLIN, 0}};
    std::vector<CopyPeer*> peers{nullptr};
    for (const auto& [process, peer] : peers_) {
      fds.push_back({peer->fd(), POLLIN, 0});
      peers.push_back(peer.get());
    }
    while (!is_stopped_) {
      for (size_t i = 1; i < fds.size(); ++i)
        fds[i].events = short(POLLIN | (peers[i]->Flush() ? POLLOUT : 0));
      if (poll(fds.data(), fds.size(), -1) < 0 && errno != EINTR) return;
      char bytes[64];
      if (fds[0].revents != 0) (void)!read(wake_[0], bytes, sizeof bytes);
      for (size_t i = 1; i < fds.size() && !is_stopped_; ++i) {
        if (fds[i].fd < 0 || (fds[i].revents & ~POLLOUT) == 0) continue;
        CopyPeer& peer = *peers[i];
        if (peer.Receive([&](auto kind, auto& reader) { return Handle(peer, kind, reader); }))
          continue;
        fds[i].fd = -1;
        HasGone(peer);
      }
    }
  }

  void TellFailure(int64_t group, const std::string& why) {
    MessageWriter body;
    body.Put(group).PutText(why);
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [numbers, clique] : cliques_)
      if (clique->group == group) TellAll(*clique, CopyMessage::kFailed, body.bytes);
  }

  // Each of these returns why a message is of no use: it is not one of ours, so this process does
  // not listen any more. Those on copies that have failed here are ignored.
  std::string Handle(CopyPeer& peer, CopyMessage kind, MessageReader& reader) {
    switch (kind) {
      case CopyMessage::kMemory:
      case CopyMessage::kGone:
        backend_.Learn(peer, kind, reader);
        return "";
      case CopyMessage::kPost:
        return HandlePost(peer, reader);
      case CopyMessage::kIssued:
        return HandleIssued(reader);
      case CopyMessage::kFailed: {
        const auto group = reader.Get<int64_t>();
        if (reader.is_valid && group >= 0)
          return "a failure of devices that are not of several processes";
        backend_.board().Fail(CopyVisitor::ScopeOf(group), reader.GetText());
        return "";
      }
      case CopyMessage::kWaited:
        return HandleWaited(peer, reader);
      case CopyMessage::kBye:
        peer.left = reader.GetText();
        return "";
    }
    return "a message of an unknown kind";
  }

  std::string HandlePost(CopyPeer& peer, MessageReader& reader) {
    const auto numbers = reader.GetAll<int64_t>();
    const bool is_too_many = numbers.size() > size_t(kMaxCopyDevices);
    const CopyClique* clique = is_too_many ? nullptr : CliqueOf(numbers);
    const int place = reader.Get<int>();
    const auto name = reader.Get<CopyName>();
    const auto execution = reader.Get<int64_t>();
    const auto is_gather = reader.Get<uint8_t>();
    if (!reader.is_valid || is_gather > 1 || clique == nullptr || place < 0 ||
        place >= int(numbers.size()) || clique->processes[place] != peer.process ||
        name.group != clique->group)
      return "copies of devices that are not its own";
    const CopyVisitor who{name.group,          execution, name.call, name.call,
                          int(numbers.size()), place,     clique};
    typename Job::Post post{};
    std::string why = ReadPost(peer, reader, is_gather, who.count, &post);
    if (!reader.is_valid) return "a message of a wrong size";
    bool is_last = false;
    JobPointer job;
    if (why.empty()) {
      const std::lock_guard<std::mutex> lock(posting_);
      job = backend_.board().StartElsewhere(who, name, is_gather, std::move(post), &is_last, &why);
    } else {
      why = NameOf(peer) + " has posted " + why;
      backend_.board().Fail(who.Scope(), why);
    }
    if (job == nullptr) {  // the other process may have heard of all starts, and wait for copies
      for (int p = 0; p < who.count; ++p)
        if (clique->processes[p] == kHere) TellIssued(*clique, name, p, why);
      return "";
    }
    Remember(job);
    if (is_last) backend_.Launch(job);
    return "";
  }

  // Returns why this process cannot copy to and from the arrays of a device.
  std::string ReadPost(CopyPeer& peer, MessageReader& reader, bool is_gather, int devices,
                       typename Job::Post* post) {
    std::string why;
    if (!backend_.GetExtra(peer, &reader, &post->extra)) why = "events that cannot be opened";
    const auto count = reader.Get<uint64_t>();
    for (uint64_t i = 0; i < count && reader.is_valid; ++i) {
      const auto source = reader.Get<CopyAddress>();
      const auto rows = reader.Get<uint64_t>(), run = reader.Get<uint64_t>();
      CopyArray array{nullptr, nullptr, rows, run, reader.Get<uint64_t>()};
      const size_t bytes = BytesOf(array, is_gather, devices);
      if (why.empty()) array.source = backend_.Reach(peer, source, bytes, &why);
      post->arrays.push_back(array);
    }
    return why;
  }

  std::string HandleIssued(MessageReader& reader) {
    const auto name = reader.Get<CopyName>();
    const int place = reader.Get<int>();
    const std::string why = reader.GetText();
    JobPointer job;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto record = records_.find(name);
      if (record == records_.end() || record->second.to_settle.erase(place) == 0) return "";
      job = record->second.job;
      ForgetIfDone(record);
    }
    if (!why.empty()) backend_.board().Fail(job->scope, why);
    why.empty() ? job->HasIssued(place) : job->HasGivenUp(place, why);
    return "";
  }

  std::string HandleWaited(CopyPeer& peer, MessageReader& reader) {
    const auto name = reader.Get<CopyName>();
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto record = records_.find(name);
    if (record == records_.end()) return "";
    record->second.to_hear.erase(peer.process);
    ForgetIfDone(record);
    return "";
  }

  static std::string NameOf(const CopyPeer& peer) {
    return "process " + std::to_string(peer.process) + " (pid " + std::to_string(peer.pid) + ")";
  }

  // Nothing will come from a process: it has gone, or this one does not listen to it any more.
  void HasGone(CopyPeer& peer) {
    const bool has_died = peer.left.empty() && peer.refused.empty();
    const std::string why = NameOf(peer) + " has " +
                            (!peer.refused.empty() ? "sent " + peer.refused
                             : !has_died           ? peer.left
                                                   : "died");
    std::vector<std::pair<JobPointer, int>> lost;
    std::set<CopyScope> failed;
    {
      const std::lock_guard<std::mutex> no_post(posting_);
      const std::lock_guard<std::mutex> lock(mutex_);
      gone_[peer.process] = why;
      for (const auto& [numbers, clique] : cliques_)
        if (peer.left.empty() && Has(*clique, peer.process)) {
          failed.insert(CopyVisitor::ScopeOf(clique->group));
          if (has_died) clique->has_died = true;
        }
      for (auto& [key, record] : records_)  // one that ended has finished what it has started
        for (const int place : std::set<int>(record.to_settle))
          if (record.job->clique->processes[place] == peer.process) {
            record.to_settle.erase(place);
            lost.push_back({record.job, place});
            failed.insert(record.job->scope);
          }
    }
    for (const CopyScope& scope : failed) backend_.board().Fail(scope, why);
    for (const auto& [job, place] : lost) job->HasGivenUp(place, why);
    if (!peer.refused.empty()) {  // it has heard why
      peer.Send(CopyMessage::kBye, MessageWriter().PutText("left").bytes);
      shutdown(peer.fd(), SHUT_RDWR);
    }
    if (has_died) waiting_.emplace_back([this, why] { Await(why); });
  }

  // Ends this process if a device of it waits for one that has died, also while Python ends.
  void Await(const std::string& why) {
    const auto pause = std::chrono::milliseconds(100);
    std::this_thread::sleep_for(10 * pause);  // a device may just be enqueuing
    const auto is_under_way = backend_.UnderWay();
    for (double waited = 0; waited < grace_seconds_; waited += 0.1) {
      if (!is_under_way()) return;
      std::this_thread::sleep_for(pause);
    }
    std::fprintf(stderr,
                 "jdistadam: %s, and for %.0f s a GPU of this process has waited for it, which "
                 "nothing else can end. This process ends. Start all processes again and "
                 "restore a checkpoint.\n",
                 why.c_str(), grace_seconds_);
    std::fflush(stderr);
    _exit(1);
  }

  // Of a source, from its first byte to its last.
  static size_t BytesOf(const CopyArray& a, bool is_gather, int devices) {
    if (a.rows == 0 || a.run == 0) return 0;
    return is_gather ? (a.rows - 1) * a.pitch + a.run : a.rows * a.run * size_t(devices);
  }

  static bool Has(const CopyClique& clique, int process) {
    return std::find(clique.processes.begin(), clique.processes.end(), process) !=
           clique.processes.end();
  }

  Backend backend_;
  int me_ = 0;
  std::map<int64_t, JoinedDevice> devices_;  // by number; not changed after Join, like the next one
  Peers peers_;
  double grace_seconds_ = 30;
  std::mutex posting_, mutex_;
  std::map<int, std::string> gone_;  // why, by process; guarded by posting_
  std::map<std::vector<int64_t>, std::unique_ptr<CopyClique>> cliques_;
  Records records_;
  std::atomic<bool> is_stopped_{false};
  int wake_[2] = {-1, -1};
  std::thread thread_;
  bool has_listened_ = false;
  std::condition_variable listened_;
  std::vector<std::thread> waiting_;  // for copies of processes that have died; of thread_
};

}  // namespace jdistadam
