#pragma once
/// \file
/// Reads tensors out of a .safetensors file: eight bytes with the length of the header, a JSON header that gives every
/// tensor its type, shape and place, then the numbers, little-endian and row by row.
/// Format: https://github.com/huggingface/safetensors
#include "dense.hpp"

#include <nlohmann/json.hpp>
#include <sash/scalar.hpp>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace smollm2 {

class safetensors {
public:
    explicit safetensors(const std::filesystem::path& path) : path_(path), file_(path, std::ios::binary) {
        if (!file_) throw std::runtime_error("cannot open " + path.string());
        const std::uint64_t size = std::filesystem::file_size(path);
        std::uint64_t length = 0;
        read(0, &length, sizeof length);
        if (length > size - sizeof length)
            throw std::runtime_error(path.string() + ": the header is longer than the file");
        std::string header(length, '\0');
        read(sizeof length, header.data(), length);
        tensors_ = nlohmann::json::parse(header);
        first_number_ = sizeof length + length;
        numbers_ = size - first_number_;
    }

    bool contains(const std::string& name) const { return tensors_.contains(name); }

    /// Copies tensor `name`, which must be [rows, columns] (or [columns], where rows is 1), to rows [first_row,
    /// first_row + rows) of a matrix. Numbers are float32, float16 or bfloat16 in the file, float afterwards.
    void read_rows(const std::string& name, matrix& to, Eigen::Index first_row, Eigen::Index rows) {
        if (!contains(name)) throw std::runtime_error(path_.string() + ": there is no tensor " + name);
        const nlohmann::json& tensor = tensors_[name];
        check_shape(name, tensor["shape"], rows, to.cols());
        const auto offsets = tensor["data_offsets"].get<std::vector<std::uint64_t>>();
        const std::string type = tensor["dtype"];
        const std::size_t count = static_cast<std::size_t>(rows * to.cols());
        const std::size_t width = type == "F32" ? 4 : type == "F16" || type == "BF16" ? 2 : 0;
        if (width == 0) throw std::runtime_error(name + " has type " + type + "; F32, F16 and BF16 can be read");
        if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > numbers_ ||
            offsets[1] - offsets[0] != count * width)
            throw std::runtime_error(path_.string() + ": the place of " + name + " does not fit its shape or the file");
        float* const target = to.row(first_row).data();
        if (type == "F32") {
            read(first_number_ + offsets[0], target, count * width);
            return;
        }
        std::vector<std::uint16_t> narrow(count);
        read(first_number_ + offsets[0], narrow.data(), count * width);
        if (type == "F16")
            widen<sash::float16>(narrow, target);
        else
            widen<sash::bfloat16>(narrow, target);
    }

private:
    void read(std::uint64_t offset, void* to, std::size_t bytes) {
        file_.seekg(static_cast<std::streamoff>(offset));
        file_.read(static_cast<char*>(to), static_cast<std::streamsize>(bytes));
        if (!file_)
            throw std::runtime_error(path_.string() + ": cannot read " + std::to_string(bytes) + " bytes at " +
                                     std::to_string(offset));
    }

    template <class Narrow>
    static void widen(const std::vector<std::uint16_t>& from, float* to) {
        for (std::size_t i = 0; i < from.size(); ++i) {
            Narrow number;
            std::memcpy(&number, &from[i], sizeof number);
            to[i] = static_cast<float>(number);
        }
    }

    static void check_shape(const std::string& name, const nlohmann::json& shape, Eigen::Index rows,
                            Eigen::Index columns) {
        const bool is_row = shape.size() == 1 && rows == 1 && shape[0] == columns;
        if (is_row || (shape.size() == 2 && shape[0] == rows && shape[1] == columns)) return;
        throw std::runtime_error(name + " has shape " + shape.dump() + ", expected [" + std::to_string(rows) + ", " +
                                 std::to_string(columns) + "]");
    }

    std::filesystem::path path_;
    std::ifstream file_;
    nlohmann::json tensors_;
    std::uint64_t first_number_ = 0, numbers_ = 0;
};

}  // namespace smollm2
