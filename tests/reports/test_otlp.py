"""A run's numbers reach an OpenTelemetry collector, here a server on loopback that keeps what it is sent."""

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from mixednuts_dist.errors import StoreError
from mixednuts_dist.reports import report
from tests.helpers.made_up_run import made_up_results


class Collector(HTTPServer):
    sent: list[ExportMetricsServiceRequest]


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            content = gzip.decompress(content)
        assert self.path == "/v1/metrics"
        self.server.sent.append(ExportMetricsServiceRequest.FromString(content))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector(("127.0.0.1", 0), Handler)
    server.sent = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_shares_and_costs_arrive_under_their_names(collector: Collector) -> None:
    results = made_up_results()
    report.send_table(results, f"http://127.0.0.1:{collector.server_port}")
    (request,) = collector.sent
    (resource,) = request.resource_metrics
    about = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
    assert (about["service.name"], about["mixednuts.run"]) == ("mixednuts", results.run_id)
    found = {
        (metric.name, *(pair.value.string_value for pair in point.attributes)): point.as_double or point.as_int
        for metric in resource.scope_metrics[0].metrics
        for point in metric.gauge.data_points
    }
    for row in results.accuracy:
        assert found["mixednuts.clean", row.classifier] == pytest.approx(row.clean.percent / 100)
        assert found["mixednuts.robust", row.classifier] == pytest.approx(row.robust.percent / 100)
    for cost in results.costs:
        assert found["mixednuts.n_forward", cost.stage] == cost.n_forward


def test_where_no_collector_is_the_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_COLLECTOR_SECONDS", 0.5)
    with pytest.raises(
        StoreError, match=r"no OpenTelemetry collector takes the run's numbers at http://127\.0\.0\.1:9;"
    ):
        report.send_table(made_up_results(), "http://127.0.0.1:9")
