// Frames on a connection: kind (1 byte), status (1), length of the text (2, little-endian), the text.
#include "comm/rank_watch.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>

namespace agoq {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

double seconds_since(Clock::time_point start) { return Seconds(Clock::now() - start).count(); }

/// A file descriptor of its own.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  int number() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }

 private:
  int number_ = -1;
};

// --- frames ---

enum class FrameKind : std::uint8_t {
  kHello = 1,  // to rank 0 when connecting: token and rank
  kWelcome,    // its answer: the token
  kAlive,      // what the sender is doing
  kGoodbye,    // the sender ends regularly; rank 0 answers with the same
  kFailed,     // to rank 0: the sender ends with `status` because of the text
  kEnd,        // from rank 0: exit with `status`
};

struct Frame {
  FrameKind kind;
  int status = 0;
  std::string text;
};

constexpr std::size_t kHeaderBytes = 4;
constexpr std::size_t kLongestText = 4000;

/// One end of a connection, with what has been received in part and what could not be sent yet.
class Connection {
 public:
  Connection() = default;
  explicit Connection(Descriptor socket) : socket_(std::move(socket)) {
    ::fcntl(socket_.number(), F_SETFL, ::fcntl(socket_.number(), F_GETFL) | O_NONBLOCK);
    const int on = 1;
    ::setsockopt(socket_.number(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }

  int number() const { return socket_.number(); }
  bool is_open() const { return static_cast<bool>(socket_); }
  void close() { socket_ = Descriptor(); }
  bool has_unsent() const { return !unsent_.empty(); }

  void send(const Frame& frame) {
    const std::string text = frame.text.substr(0, kLongestText);
    unsent_ += static_cast<char>(frame.kind);
    unsent_ += static_cast<char>(frame.status);
    unsent_ += static_cast<char>(text.size() & 0xFF);
    unsent_ += static_cast<char>(text.size() >> 8);
    unsent_ += text;
    flush();
  }
  /// Sends what the kernel takes. A broken connection shows when it is read from.
  void flush() {
    while (!unsent_.empty()) {
      const ssize_t count = ::send(number(), unsent_.data(), unsent_.size(), MSG_NOSIGNAL);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return;
      unsent_.erase(0, static_cast<std::size_t>(count));
    }
  }
  /// Calls take(frame) for what has come; false when the connection has closed.
  template <typename Take>
  bool receive(Take take) {
    bool open = true;
    for (;;) {
      char piece[4096];
      const ssize_t count = ::recv(number(), piece, sizeof piece, 0);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
      open = count > 0;
      if (!open) break;
      received_.append(piece, static_cast<std::size_t>(count));
    }
    while (received_.size() >= kHeaderBytes) {
      const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(received_[i]); };
      const std::size_t length = byte(2) + std::size_t{256} * byte(3);
      if (received_.size() < kHeaderBytes + length) break;
      const Frame frame{static_cast<FrameKind>(byte(0)), byte(1),
                        received_.substr(kHeaderBytes, length)};
      received_.erase(0, kHeaderBytes + length);
      take(frame);
    }
    return open;
  }

 private:
  Descriptor socket_;
  std::string received_;
  std::string unsent_;
};

// --- who and where ---

/// What a rank tells the others of itself.
struct Place {
  char host[65] = {};
  char network[160] = {};  // equal for processes that reach each other on 127.0.0.1
  std::int64_t pid = 0;
};

Place place_of_this_process() {
  Place place;
  ::gethostname(place.host, sizeof place.host - 1);
  place.pid = ::getpid();
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::error_code error;
  const std::string name_space = std::filesystem::read_symlink("/proc/self/ns/net", error).string();
  // Where /proc does not say, only a process of the same host name is taken to be near.
  const std::string network = boot + " " + name_space + (error ? place.host : "");
  network.copy(place.network, sizeof place.network - 1);
  return place;
}

struct FreeAddresses {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
  void operator()(ifaddrs* list) const { ::freeifaddrs(list); }
};

/// The numeric addresses under which other machines may reach this one.
std::vector<std::string> addresses_of_this_machine() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return {};
  const std::unique_ptr<ifaddrs, FreeAddresses> list(first);
  std::vector<std::string> addresses;
  for (const ifaddrs* item = first; item != nullptr; item = item->ifa_next) {
    if (item->ifa_addr == nullptr || (item->ifa_flags & IFF_UP) == 0 ||
        (item->ifa_flags & IFF_LOOPBACK) != 0) {
      continue;
    }
    char text[INET6_ADDRSTRLEN] = {};
    if (item->ifa_addr->sa_family == AF_INET) {
      const auto* address = reinterpret_cast<const sockaddr_in*>(item->ifa_addr);
      ::inet_ntop(AF_INET, &address->sin_addr, text, sizeof text);
    } else if (item->ifa_addr->sa_family == AF_INET6) {
      const auto* address = reinterpret_cast<const sockaddr_in6*>(item->ifa_addr);
      // Link-local addresses mean something on their own link only.
      if (!IN6_IS_ADDR_LINKLOCAL(&address->sin6_addr)) {
        ::inet_ntop(AF_INET6, &address->sin6_addr, text, sizeof text);
      }
    }
    if (*text != '\0') addresses.emplace_back(text);
  }
  return addresses;
}

std::string reason() { return std::strerror(errno); }

struct Listener {
  Descriptor socket;
  int port = 0;
};

/// Listens on a port that the kernel picks: on every address of the machine, IPv6 and IPv4, or on
/// 127.0.0.1.
Listener listen_for_ranks(bool everywhere, int ranks) {
  Descriptor socket;
  bool bound = false;
  if (everywhere) {
    socket = Descriptor(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int off = 0;
    sockaddr_in6 address{};
    address.sin6_family = AF_INET6;
    address.sin6_addr = in6addr_any;
    bound = socket && ::setsockopt(socket.number(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0 &&
            ::bind(socket.number(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  }
  if (!bound) {  // not asked for, or a machine without IPv6
    socket = Descriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(everywhere ? INADDR_ANY : INADDR_LOOPBACK);
    bound = socket &&
            ::bind(socket.number(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  }
  const bool listening = bound && ::listen(socket.number(), ranks) == 0;
  check(listening, "no TCP port to watch the ranks on: {}", reason());
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  ::getsockname(socket.number(), reinterpret_cast<sockaddr*>(&address), &length);
  const int port = address.ss_family == AF_INET6
                       ? ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port)
                       : ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
  ::fcntl(socket.number(), F_SETFL, ::fcntl(socket.number(), F_GETFL) | O_NONBLOCK);
  return {std::move(socket), port};
}

bool wait_for(int descriptor, short events, double seconds) {
  pollfd poll{descriptor, events, 0};
  const int milliseconds = static_cast<int>(std::max(seconds, 0.0) * 1e3) + 1;
  return ::poll(&poll, 1, milliseconds) > 0;
}

/// Connects within `seconds`; an empty descriptor and `why` if that fails.
Descriptor connect_to(const std::string& address, const std::string& port, double seconds,
                      std::string& why) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* first = nullptr;
  if (::getaddrinfo(address.c_str(), port.c_str(), &hints, &first) != 0 || first == nullptr) {
    why = "not an address";
    return {};
  }
  const std::unique_ptr<addrinfo, FreeAddresses> list(first);
  Descriptor socket(::socket(first->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket ||
      (::connect(socket.number(), first->ai_addr, first->ai_addrlen) != 0 && errno != EINPROGRESS)) {
    why = reason();
    return {};
  }
  int error = ETIMEDOUT;
  if (wait_for(socket.number(), POLLOUT, seconds)) {
    socklen_t length = sizeof error;
    ::getsockopt(socket.number(), SOL_SOCKET, SO_ERROR, &error, &length);
  }
  if (error == 0) return socket;
  why = std::strerror(error);
  return {};
}

std::string new_token() {
  std::random_device random;
  std::string token;
  for (int i = 0; i < 4; ++i) token += fmt::format("{:08x}", random());
  return token;
}

std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find(' ', at), text.size());
    words.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return words;
}

// Of one attempt to connect, and of all of them.
constexpr double kAttemptSeconds = 3;
constexpr double kConnectSeconds = 30;

/// Rank 0's side: the connections of ranks 1 ..., in their order.
std::vector<Connection> accept_ranks(const Listener& listener, const std::string& token, int ranks) {
  std::vector<Connection> of_rank(static_cast<std::size_t>(ranks));
  std::vector<Connection> strangers;  // have not said who they are
  int missing = ranks - 1;
  const Clock::time_point start = Clock::now();
  while (missing > 0) {
    std::vector<pollfd> polls{{listener.socket.number(), POLLIN, 0}};
    for (const Connection& stranger : strangers) polls.push_back({stranger.number(), POLLIN, 0});
    ::poll(polls.data(), polls.size(), 100);
    if (seconds_since(start) > kConnectSeconds) {
      std::string names;
      for (std::size_t r = 1; r < of_rank.size(); ++r) {
        if (!of_rank[r].is_open()) names += (names.empty() ? "" : ", ") + std::to_string(r);
      }
      fail("rank {} has not connected to rank 0 within {} s", names, kConnectSeconds);
    }
    for (;;) {
      Descriptor socket(::accept4(listener.socket.number(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!socket) break;
      strangers.emplace_back(std::move(socket));
    }
    for (Connection& stranger : strangers) {
      std::size_t rank = 0;
      const bool open = stranger.receive([&](const Frame& frame) {
        const std::vector<std::string> words = words_of(frame.text);
        if (frame.kind != FrameKind::kHello || words.size() != 2 || words[0] != token) return;
        rank = std::strtoul(words[1].c_str(), nullptr, 10);
      });
      if (rank > 0 && rank < of_rank.size() && !of_rank[rank].is_open()) {
        stranger.send({FrameKind::kWelcome, 0, token});
        of_rank[rank] = std::move(stranger);
        --missing;
      } else if (!open) {
        stranger.close();
      }
    }
    std::erase_if(strangers, [](const Connection& stranger) { return !stranger.is_open(); });
  }
  return of_rank;
}

/// Another rank's side: tries the addresses until one is rank 0's, which the token shows.
Connection connect_to_rank_0(const std::vector<std::string>& addresses, const std::string& port,
                             const std::string& token, int rank, const std::string& host) {
  const Clock::time_point start = Clock::now();
  std::string tried;
  while (seconds_since(start) < kConnectSeconds) {
    tried.clear();
    for (const std::string& address : addresses) {
      std::string why = "somebody else answers there";
      Descriptor socket = connect_to(address, port, kAttemptSeconds, why);
      if (socket) {
        Connection connection(std::move(socket));
        connection.send({FrameKind::kHello, 0, fmt::format("{} {}", token, rank)});
        bool welcome = false;
        bool open = true;
        const Clock::time_point asked = Clock::now();
        while (open && !welcome && seconds_since(asked) < kAttemptSeconds) {
          wait_for(connection.number(), POLLIN, 0.1);
          open = connection.receive([&](const Frame& frame) {
            welcome = welcome || (frame.kind == FrameKind::kWelcome && frame.text == token);
          });
        }
        if (welcome) return connection;
      }
      tried += fmt::format("{}{}: {}", tried.empty() ? "" : "; ", address, why);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  fail(
      "rank 0 on {} cannot be reached at port {} ({}): let the machines of the run connect to each "
      "other by TCP, or set the timeout to 0, and no rank is watched",
      host, port, tried.empty() ? "it has no address" : tried);
}

/// One line to stderr, whole even where other threads or ranks print.
void print_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  text = "agoq: " + text + "\n";
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
}

}  // namespace

// --- the thread ---

class RankWatch::Thread {
 public:
  Thread(Communicator& group, const RankWatchOptions& options)
      : rank_(group.rank()),
        size_(group.size()),
        advice_(options.advice),
        interval_(std::clamp(options.timeout_seconds / 10, 0.01, 1.0)),
        silence_(0.8 * options.timeout_seconds),
        places_(group.gather_values(place_of_this_process())),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    connect(group);
    for (Peer& peer : peers_) peer.heard = Clock::now();
    // Signals are the main thread's.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { watch(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void set_activity(const char* activity) {
    const std::lock_guard lock(mutex_);
    std::strncpy(activity_.data(), activity, activity_.size() - 1);
  }

  void leave() {
    ask([](Request& request) { request.goodbye = true; });
    thread_.join();
  }

  [[noreturn]] void fail(const std::string& text, int status) {
    std::fflush(nullptr);  // _exit will not
    ask([&](Request& request) { request.failure = Frame{FrameKind::kFailed, status, text}; });
    // The thread ends the process.
    for (;;) ::pause();
  }
  [[noreturn]] void fail_together(const std::string& text, int status) {
    std::fflush(nullptr);
    if (rank_ == 0) ask([&](Request& request) { request.end = Frame{FrameKind::kEnd, status, text}; });
    for (;;) ::pause();
  }

 private:
  struct Peer {
    int rank = 0;
    Connection connection;
    Clock::time_point heard;
    std::string activity = "its start";
    bool gone = false;  // has said goodbye
  };
  /// What the main thread wants of the thread.
  struct Request {
    bool goodbye = false;
    std::optional<Frame> failure;
    std::optional<Frame> end;
  };

  void connect(Communicator& group) {
    const Place& first = places_.front();
    const bool near = std::all_of(places_.begin(), places_.end(), [&](const Place& place) {
      return std::strcmp(place.network, first.network) == 0;
    });
    // Whatever fails on one rank is gathered, so that all ranks fail with it.
    std::string failure, offer;
    Listener listener;
    std::string token;
    if (rank_ == 0) {
      try {
        check(static_cast<bool>(wake_), "an eventfd could not be made: {}", reason());
        listener = listen_for_ranks(!near, size_);
        token = new_token();
        offer =
            fmt::format("{} {} {}", token, listener.port,
                        fmt::join(near ? std::vector<std::string>{} : addresses_of_this_machine(), " "));
      } catch (const Error& error) {
        failure = error.what();
      }
    }
    const std::vector<std::string> offered = words_of(group.gather_texts(offer).front());
    if (offered.size() >= 2) {
      try {
        check(static_cast<bool>(wake_), "an eventfd could not be made: {}", reason());
        if (rank_ == 0) {
          std::vector<Connection> connections = accept_ranks(listener, token, size_);
          for (int r = 1; r < size_; ++r) {
            peers_.push_back({r, std::move(connections[static_cast<std::size_t>(r)]), {}});
          }
        } else {
          const bool near_first =
              std::strcmp(places_[static_cast<std::size_t>(rank_)].network, first.network) == 0;
          const std::vector<std::string> addresses =
              near_first ? std::vector<std::string>{"127.0.0.1"}
                         : std::vector<std::string>(offered.begin() + 2, offered.end());
          peers_.push_back(
              {0, connect_to_rank_0(addresses, offered[1], offered[0], rank_, first.host), {}});
        }
      } catch (const Error& error) {
        failure = error.what();
      }
    }
    const std::vector<std::string> failures = group.gather_texts(failure);
    // What a rank says that could not connect tells more than that rank 0 has waited for it.
    for (int r = size_ - 1; r >= 0; --r) {
      const std::string& text = failures[static_cast<std::size_t>(r)];
      check(text.empty(), "the ranks cannot be watched: {}: {}", name_of(r), text);
    }
  }

  template <typename Change>
  void ask(Change change) {
    {
      const std::lock_guard lock(mutex_);
      change(request_);
    }
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_.number(), &one, sizeof one);
  }

  std::string name_of(int rank) const {
    const Place& place = places_[static_cast<std::size_t>(rank)];
    return fmt::format("rank {} of {} (host {}, pid {})", rank, size_, place.host, place.pid);
  }

  std::string own_activity() {
    const std::lock_guard lock(mutex_);
    return activity_.data();
  }

  void watch() {
    Clock::time_point sent{};
    Clock::time_point turn = Clock::now();
    for (;;) {
      std::vector<pollfd> polls{{wake_.number(), POLLIN, 0}};
      for (const Peer& peer : peers_) {
        polls.push_back({peer.connection.number(), POLLIN, 0});  // a closed one's -1 is passed over
      }
      const double wait = interval_ - seconds_since(sent);
      if (wait > 0) ::poll(polls.data(), polls.size(), static_cast<int>(wait * 1e3) + 1);
      std::uint64_t ignored = 0;
      [[maybe_unused]] const ssize_t count = ::read(wake_.number(), &ignored, sizeof ignored);

      // After a halt of this process, or of all of them, nobody's silence means anything.
      const bool halted = seconds_since(turn) > silence_ / 2;
      turn = Clock::now();
      for (Peer& peer : peers_) {
        if (halted) peer.heard = turn;
        if (peer.connection.is_open()) hear(peer);
      }
      for (Peer& peer : peers_) {
        if (!peer.gone && seconds_since(peer.heard) > silence_) {
          end_lost(peer, fmt::format("has given no sign of life for {:.1f} s (stopped, or its machine "
                                     "or network is down)",
                                     seconds_since(peer.heard)));
        }
      }
      if (carry_out_request()) return;
      if (seconds_since(sent) >= interval_) {
        sent = Clock::now();
        const std::string activity = own_activity();
        for (Peer& peer : peers_) {
          if (peer.gone || !peer.connection.is_open()) continue;
          peer.connection.flush();
          // A peer that takes nothing finds the newest when it does.
          if (!peer.connection.has_unsent()) {
            peer.connection.send({FrameKind::kAlive, 0, activity});
          }
        }
      }
    }
  }

  /// Takes what a peer has sent, and ends the process if that was its end.
  void hear(Peer& peer) {
    const bool open = peer.connection.receive([&](const Frame& frame) {
      peer.heard = Clock::now();
      switch (frame.kind) {
        case FrameKind::kAlive: peer.activity = frame.text; break;
        case FrameKind::kGoodbye:
          peer.gone = true;
          if (rank_ == 0) peer.connection.send({FrameKind::kGoodbye, 0, ""});
          break;
        case FrameKind::kFailed:
          end(fmt::format("{}, in {}: {}", name_of(peer.rank), peer.activity, frame.text), frame.status);
        case FrameKind::kEnd: ::_exit(frame.status);
        default: break;
      }
    });
    if (open) return;
    peer.connection.close();
    if (!peer.gone) end_lost(peer, "is gone: its connection closed without a goodbye");
  }

  /// Whether the thread has nothing left to do.
  bool carry_out_request() {
    Request request;
    {
      const std::lock_guard lock(mutex_);
      request = request_;
    }
    if (request.end) end(request.end->text, request.end->status);
    if (request.failure) {
      const Frame& failure = *request.failure;
      const std::string line =
          fmt::format("{}, in {}: {}", name_of(rank_), own_activity(), failure.text);
      if (rank_ == 0) end(line, failure.status);
      Connection& connection = peers_.front().connection;
      connection.send(failure);
      const Clock::time_point start = Clock::now();
      while (seconds_since(start) < kAnswerSeconds) {
        wait_for(connection.number(), POLLIN, 0.1);
        bool told = false;
        const bool open = connection.receive(
            [&](const Frame& frame) { told = told || frame.kind == FrameKind::kEnd; });
        if (told) ::_exit(failure.status);
        if (!open) break;
      }
      // Rank 0 says nothing: this rank does.
      print_line(line);
      ::_exit(failure.status);
    }
    if (!request.goodbye) return false;
    if (rank_ == 0) {
      return std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.gone; });
    }
    Peer& first = peers_.front();
    if (!said_goodbye_) first.connection.send({FrameKind::kGoodbye, 0, ""});
    said_goodbye_ = true;
    // Its answer: were the connection closed before, what has not been read of it would be lost.
    return first.gone;
  }

  [[noreturn]] void end_lost(const Peer& peer, const std::string& what) {
    // Where rank 0 is lost every rank notices. The first that ends makes the launcher end the others.
    if (rank_ > 1) std::this_thread::sleep_for(Seconds(std::min(0.2 * (rank_ - 1), 1.5 * interval_)));
    end(fmt::format("{} {}, last in {}; all ranks end: {}", name_of(peer.rank), what, peer.activity,
                    advice_),
        1);
  }

  [[noreturn]] void end(const std::string& line, int status) {
    print_line(line);
    if (rank_ == 0) {
      for (Peer& peer : peers_) {
        if (!peer.gone && peer.connection.is_open()) peer.connection.send({FrameKind::kEnd, status, ""});
      }
      // What is on its way is lost where this process ends with something unread: the others close
      // first.
      const Clock::time_point start = Clock::now();
      while (seconds_since(start) < kAnswerSeconds / 2) {
        bool waiting = false;
        for (Peer& peer : peers_) {
          if (!peer.connection.is_open()) continue;
          peer.connection.flush();
          if (!peer.connection.receive([](const Frame&) {})) peer.connection.close();
          waiting = waiting || (peer.connection.is_open() && !peer.gone &&
                                seconds_since(peer.heard) < 3 * interval_);
        }
        if (!waiting) break;
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    }
    ::_exit(status);
  }

  // What rank 0 takes to answer at most.
  static constexpr double kAnswerSeconds = 2;

  int rank_;
  int size_;
  std::string advice_;
  double interval_;  // seconds between signs of life
  double silence_;   // seconds without one after which a rank is lost
  std::vector<Place> places_;
  Descriptor wake_;
  std::vector<Peer> peers_;  // of rank 0: all others; of the others: rank 0
  bool said_goodbye_ = false;

  std::mutex mutex_;  // of the two below
  std::array<char, kLongestActivity + 1> activity_{"its start"};
  Request request_;

  std::thread thread_;
};

RankWatch::RankWatch(Communicator& group, const RankWatchOptions& options)
    : exceptions_(std::uncaught_exceptions()) {
  check_input(options.timeout_seconds >= 0,
              "the timeout of ranks must not be negative, and is 0 for none; it is {}",
              options.timeout_seconds);
  if (group.size() > 1 && options.timeout_seconds > 0)
    thread_ = std::make_unique<Thread>(group, options);
}

RankWatch::~RankWatch() {
  if (thread_ == nullptr) return;
  if (std::uncaught_exceptions() > exceptions_) thread_->fail("it ended by an error", 1);
  thread_->leave();
}

void RankWatch::set_activity(const char* activity) { thread_->set_activity(activity); }

void RankWatch::fail(const std::string& text, int status) {
  if (thread_ != nullptr) thread_->fail(text, status);
}

void RankWatch::fail_together(const std::string& text, int status) {
  if (thread_ != nullptr) thread_->fail_together(text, status);
}

}  // namespace agoq
