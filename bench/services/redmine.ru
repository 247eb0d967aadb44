# Debian's Redmine, with a database of its own that is as empty as the package has made it. Each request is one
# for its list of projects, the answer to which does not depend on when and where it was started.
require "fileutils"
ENV["RAILS_ENV"] = "production"
ENV["RAILS_LOG_TO_STDOUT"] = "yes"
ENV["X_DEBIAN_SITEID"] = "default"
# The directories that the package's programs write to are not in the container.
FileUtils.mkdir_p(%w[/var/cache/redmine/default/tmp /var/cache/redmine/default/plugin_assets /var/log/redmine/default])
FileUtils.cp("/var/lib/dbconfig-common/sqlite3/redmine/instances/default/redmine_default", "/redmine.sqlite3")
ENV["DATABASE_URL"] = "sqlite3:/redmine.sqlite3"
Dir.chdir("/usr/share/redmine")
require "/usr/share/redmine/config/environment"
run ->(env) { Rails.application.call(env.merge("PATH_INFO" => "/projects.json")) }
