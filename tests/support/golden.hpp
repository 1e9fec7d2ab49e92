#pragma once
// Reader of the golden files. tests/golden/golden_file.py writes them and describes the format.
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace golden {

struct tensor {  // row-major
    std::vector<std::int64_t> shape;
    std::vector<double> values;

    std::int64_t extent(std::size_t axis) const { return shape.at(axis); }
    std::vector<float> floats() const {  // exact for inputs, which are float32
        std::vector<float> narrowed;
        for (const double x : values) narrowed.push_back(static_cast<float>(x));
        return narrowed;
    }
};

struct test_case {
    std::string file, name;
    std::map<std::string, std::int64_t> integers;
    std::map<std::string, double> reals;
    std::map<std::string, std::string> texts;
    std::map<std::string, tensor> tensors;

    std::int64_t integer(const std::string& key) const { return get(integers, key); }
    double real(const std::string& key) const { return get(reals, key); }
    double real(const std::string& key, double otherwise) const { return reals.count(key) ? real(key) : otherwise; }
    std::string text(const std::string& key) const { return texts.count(key) ? get(texts, key) : ""; }
    bool has(const std::string& key) const { return tensors.count(key) != 0; }
    const tensor& operator[](const std::string& key) const { return get(tensors, key); }

private:
    template <class T>
    const T& get(const std::map<std::string, T>& entries, const std::string& key) const {
        const auto found = entries.find(key);
        if (found == entries.end()) throw std::runtime_error(file + ": case '" + name + "' has no '" + key + "'");
        return found->second;
    }
};

// The words of a tensor's line give rank and extents; its values follow in the file. Numbers go through strtod:
// extracting them from the stream would take most of a test's time.
inline tensor read_tensor(std::istream& words, std::istream& in, const std::string& where) {
    std::size_t rank = 0, count = 1;
    words >> rank;
    tensor made{std::vector<std::int64_t>(words ? rank : 0), {}};
    for (std::int64_t& extent : made.shape) words >> extent, count *= static_cast<std::size_t>(extent);
    for (std::string line; words && made.values.size() < count && std::getline(in, line);) {
        const char* at = line.c_str();
        for (char* end = nullptr; *at != '\0'; at = end) {
            made.values.push_back(std::strtod(at, &end));
            if (end == at) throw std::runtime_error(where + ": not a number: '" + at + "'");
        }
    }
    if (words && made.values.size() == count) return made;
    throw std::runtime_error(where + ": wrong extents, or not as many values as they announce");
}

// The last case, with everything that the case `other` says.
inline test_case like(const std::string& other, const std::vector<test_case>& cases) {
    for (const test_case& c : cases)
        if (c.name == other) return {c.file, cases.back().name, c.integers, c.reals, c.texts, c.tensors};
    throw std::runtime_error(cases.back().file + ": no case '" + other + "' to be like");
}

inline std::vector<test_case> read(const std::string& path) {
    std::ifstream in(path);
    if (!in) throw std::runtime_error("cannot open the golden file " + path);
    std::vector<test_case> cases;
    for (std::string line, kind, name; std::getline(in, line);) {
        if (line.empty() || line[0] == '#') continue;
        std::istringstream words(line);
        words >> kind >> std::ws;
        kind == "case" || kind == "like" ? void(std::getline(words, name)) : void(words >> name);
        if (kind == "case") cases.push_back({path, name, {}, {}, {}, {}});
        if (cases.empty()) throw std::runtime_error(path + ": '" + line + "' stands before the first case");
        test_case& now = cases.back();
        if (std::string(" case like int real text tensor ").find(" " + kind + " ") == std::string::npos)
            words.clear(words.failbit);
        if (kind == "like") now = like(name, cases);
        if (kind == "int") words >> now.integers[name];
        if (kind == "real") words >> now.reals[name];
        if (kind == "text") words >> now.texts[name];
        if (kind == "tensor") now.tensors[name] = read_tensor(words, in, path + ": " + now.name + ": " + name);
        if (!words) throw std::runtime_error(path + ": cannot read '" + line + "'");
    }
    return cases;
}

}  // namespace golden
