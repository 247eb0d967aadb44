# A service of Sinatra with thousands of classes, as a large Rails application has them. It answers with what
# does not depend on when and where it was started.
require "sinatra/base"
require "json"
require "erb"
require "yaml"
require "csv"
require "net/http"
require "openssl"

module Models
  6000.times do |number|
    methods = (0...8).map { |at| "def method_#{at}(x) = (x * #{number} + #{at}) % 1000003\n" }
    class_eval("class Model#{number}\n#{methods.join}end")
  end
end
ITEMS = Array.new(200_000) { |number| { id: number, name: "item #{number}" } }
WARM = Models.constants.sort.sum { |name| Models.const_get(name).new.method_3(7) }

class Service < Sinatra::Base
  set :environment, :production
  get("/") { "#{WARM} #{ITEMS.last[:name]} #{Models::Model77.new.method_5(5)}\n" }
end
run Service
